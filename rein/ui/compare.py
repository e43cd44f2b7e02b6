"""Several runs side by side: their curves on the same charts, and the settings that are not the same in all.

Knows no file and no page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import escape

from rein.report import charts, html
from rein.ui.lines import Curves


def together(stage: str, runs: Sequence[tuple[str, Mapping[str, Curves]]]) -> list[dict[str, Any]]:
    """The stage's charts with the lines of every run: a color a run, a dash a metric."""
    found: dict[str, dict[str, Any]] = {}
    for index, (name, curves) in enumerate(runs):
        for chart in charts.draw(stage, curves[stage].lines):
            whole = found.setdefault(chart["title"], {**chart, "lines": []})
            whole["log"] = whole["log"] and chart["log"]
            metrics = list(dict.fromkeys(line["metric"] for line in (*whole["lines"], *chart["lines"])))
            for line in chart["lines"]:
                more = f": {line['label']}" if len(chart["lines"]) > 1 else ""
                label = f"{escape(name)}{more}"  # Plotly reads tags in names: they are text here
                dash, alone = metrics.index(line["metric"]), line["label"]
                whole["lines"].append({**line, "label": label, "alone": alone, "color": index, "dash": dash})
    for whole in found.values():
        whole["sentence"] += _dashes(whole["lines"])
    order = [chart.title for chart in charts.CHARTS[stage]]
    return sorted(found.values(), key=lambda chart: order.index(chart["title"]))


def differing(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Keys that are not the same in all runs, with each run's value; the folder itself never is."""
    every = [dict(html.changed(one, {})) for one in settings]
    keys = list(dict.fromkeys(key for one in every for key in one if key != "out"))
    values = [(key, [one.get(key, "–") for one in every]) for key in keys]
    return [(key, of) for key, of in values if len(set(of)) > 1]


def _dashes(lines: Sequence[Mapping[str, Any]]) -> str:
    """Which metric is drawn how, where there are several."""
    names = {line["dash"]: line["alone"] for line in lines}
    drawn = ("solid", "dashed", "dotted")
    said = ", ".join(f"{names[i]} {drawn[i % 3]}" for i in sorted(names))
    return f" Drawn: {said}." if len(names) > 1 else ""
