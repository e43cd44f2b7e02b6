"""What a page of facts is made of: sections with rows, bar charts and sentences, and what looks wrong.

A section is made by a pure function of facts and knows neither the terminal nor the page it is shown on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One row of a section's table. Fact("usable rows", "198", "99.0 %")"""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart: `x` are names, or the left edges of bins of one width."""

    title: str
    x: Sequence[str | float]
    y: Sequence[float]
    x_title: str = ""
    y_title: str = "rows"
    width: float | None = None  # of a bin; None: x are names
    open: bool = False  # the last bin holds all that lies beyond
    open_below: bool = False  # or the first one does


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page; `warnings` are the sentences that ask for attention."""

    title: str
    rows: Sequence[Fact] = ()
    charts: Sequence[Bars] = ()
    sentences: Sequence[str] = ()
    warnings: Sequence[str] = ()


def bars(
    title: str, facts: Facts | None, x_title: str, y_title: str = "rows", *, below: bool = False
) -> list[Bars]:
    """The chart of a distribution's or a token histogram's facts; none of nothing."""
    if facts is None:
        return []
    if len(facts.get("values", ())) > 1:
        names, counts = zip(*facts["values"], strict=True)
        return [Bars(title, [f"{value:.4g}" for value in names], list(counts), x_title, y_title)]
    made = facts.get("histogram", facts)
    edges = made["edges"]
    width = (edges[-1] - edges[0]) / max(len(made["counts"]), 1)
    if not width or not math.isfinite(width):
        return []
    return [
        Bars(
            title,
            edges[:-1],
            made["counts"],
            x_title,
            y_title,
            width,
            made["open"] and not below,
            made["open"] and below,
        )
    ]


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share; one that is neither nothing nor everything is never shown as if it were."""
    if value is None:
        return "–"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 < value < 1 else f"{100 * value:.1f} %"


def quantiles(facts: Facts | None) -> str:
    """The middle and the ends of a distribution in one line."""
    if facts is None:
        return "–"
    if facts["min"] == facts["max"]:
        return f"all {figure(facts['min'])}"
    return f"median {figure(facts['p50'])}, 5 % to 95 %: {figure(facts['p5'])} to {figure(facts['p95'])}"


def ends(facts: Facts | None) -> str:
    return (
        ""
        if facts is None
        else f"{figure(facts['min'])} to {figure(facts['max'])}, mean {figure(facts['mean'])}"
    )
