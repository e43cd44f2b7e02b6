"""How numbers are written on the report's page. Text alone."""

from collections.abc import Sequence
from typing import Any


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """Of a difference between shares."""
    return "–" if value is None else f"{100 * value:+.1f}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4g}"


def interval(ends: Sequence[float | None] | None, show: Any = number) -> str:
    """0.1 to 0.3; nothing where there is none, an end that is not finite is said to be open."""
    if not ends:
        return ""
    low, high = ("open" if end is None else show(end) for end in ends)
    return f"{low} to {high}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    whole = round(value)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{value:.1f} s"
