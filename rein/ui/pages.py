"""The pages as text: what is known of runs and rows in, HTML out. Everything from a file is escaped.

A part of a page whose file holds something unexpected is left out, and a sentence stands in its place.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rein.config.load import resolved
from rein.config.recipe import Recipe
from rein.errors import shown
from rein.report import charts, events, figures, html
from rein.report.evaluation import comparison, outcome
from rein.ui import compare, pieces, rows
from rein.ui.folder import Broken
from rein.ui.runs import WITH_CURVES, Runs, Summary
from rein.ui.table import Query, Table

HERE = Path(__file__).parent
STAGE_TITLES = {"train": "Training", "reward": "Reward model", "sft": "Fine-tuning"}
LIVE_LIST, LIVE_RUN, LIVE_ENDED = 3, 2, 15  # seconds until a page is asked for again
FEWEST, MOST = 2, 6  # runs that are compared
UNEXPECTED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError)
SORTS: dict[str, tuple[str, Callable[[Summary], Any]]] = {
    "name": ("Run", lambda run: run.name),
    "state": ("State", lambda run: run.state),
    "lift": ("Outcome", lambda run: run.lift),
    "score": ("Held-out score", lambda run: run.score),
    "kl": ("KL", lambda run: run.kl),
    "updates": ("Updates", lambda run: run.updates),
    "guards": ("Guards", lambda run: run.guards),
    "seconds": ("Time", lambda run: run.seconds),
}

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Html:
    """A page and the nonce that its scripts have."""

    text: str
    nonce: str


class Pages:
    """Makes every page."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._defaults = resolved(Recipe())

    def label(self, name: str) -> str:
        """`.` is the folder itself."""
        return self.runs.folder.root.name if name == "." else name

    def error(self, title: str, sentence: str) -> Html:
        return self._render("error.html", title=title, sentence=sentence, live=0)

    def all(self, text: str, sort: str, order: str, chosen: Sequence[str]) -> Html:
        """All runs, those whose name or state holds the text, in order."""
        found, cut = self.runs.all()
        words = text.casefold().split()
        kept = [
            run for run in found if all(w in f"{run.name} {run.state} {run.why}".casefold() for w in words)
        ]
        key = SORTS.get(sort, SORTS["name"])[1]
        known = [run for run in kept if key(run) is not None]
        known.sort(key=key, reverse=order == "down")
        return self._render(
            "list.html",
            title=f"Runs in {self.runs.folder.root.name}",
            runs=[*known, *(run for run in kept if key(run) is None)],
            total=len(found),
            cut=cut,
            text=text,
            sort=sort,
            order=order,
            sorts={name: title for name, (title, _) in SORTS.items()},
            chosen=set(chosen),
            sparkline=sparkline,
            live=LIVE_LIST,
        )

    def run(self, name: str) -> Html:
        """What the report says, as far as the run has come."""
        summary, notes = self.runs.summary(self.runs.known(name)), []

        def part(what: str, make: Callable[[], Made]) -> Made | None:
            try:
                return make()
            except (Broken, *UNEXPECTED) as error:
                notes.append(
                    str(error) if isinstance(error, Broken) else f"{what}: cannot be shown; look at it"
                )
                return None

        evaluation = part("evaluate/evaluation.json", lambda: self.runs.evaluation(name))
        manifests = part("manifest.json", lambda: self.runs.manifests(name)) or {}
        settings = part("recipe.json", lambda: self.runs.settings(name)) or {}
        lines = self.runs.journal(name)
        guards = part("train/journal.jsonl", lambda: events.section(lines))
        drawn = self._curves(name, notes)
        marks = {key: guards[key] for key in ("marks", "undone")} if guards else {}
        return self._render(
            "run.html",
            title=self.label(name),
            name=name,
            run=summary,
            outcome=part("evaluate/evaluation.json", lambda: outcome(evaluation)),
            comparison=part("evaluate/evaluation.json", lambda: comparison(evaluation)) or [],
            sources=part("evaluate/evaluation.json", lambda: _sources(evaluation)) or [],
            gate=part("summary.json", lambda: _gate(manifests, self.runs.whole(name))) or [],
            guards=guards if "train" in drawn or lines else None,
            drawn=drawn,
            data=html.json_for_script({"charts": drawn, "guards": marks}),
            funnel=part("manifest.json", lambda: html.funnel(manifests)) or [],
            changed=part("recipe.json", lambda: html.changed(settings, self._defaults)) or [],
            files=rows.files(self.runs.folder, name),
            notes=list(dict.fromkeys([*summary.notes, *notes])),
            live=LIVE_RUN if summary.state == "running" else LIVE_ENDED,
        )

    def _curves(self, name: str, notes: list[str]) -> dict[str, list[dict[str, Any]]]:
        drawn = {}
        for stage, curves in self.runs.curves(name).items():
            if found := charts.draw(stage, curves.lines):
                drawn[stage] = found
            if curves.bad:
                notes.append(f"{stage}/metrics.jsonl: {curves.bad} lines are no metrics, and are passed over")
        return {stage: drawn[stage] for stage in ("train", "reward", "sft") if stage in drawn}

    def compare(self, names: Sequence[str]) -> Html:
        """Several runs on the same charts."""
        names = list(dict.fromkeys(names))
        if not FEWEST <= len(names) <= MOST:
            raise Broken(f"compare: {len(names)} runs are chosen; choose {FEWEST} to {MOST} in the list")
        summaries = [self.runs.summary(self.runs.known(name)) for name in names]
        curves = [(self.label(name), self.runs.curves(name)) for name in names]
        drawn = {stage: compare.together(stage, curves) for stage in WITH_CURVES}
        several = {stage: found for stage in ("train", "reward", "sft") if (found := drawn[stage])}
        running = any(run.state == "running" for run in summaries)
        return self._render(
            "compare.html",
            title="Compare",
            runs=summaries,
            drawn=several,
            data=html.json_for_script({"charts": several, "guards": {}}),
            differing=compare.differing([self._settings(name) for name in names]),
            live=LIVE_RUN if running else LIVE_ENDED,
        )

    def _settings(self, name: str) -> dict[str, Any]:
        try:
            return self.runs.settings(name)
        except Broken:
            return {}

    def rows(
        self, name: str, file: str, table: Table, query: Query, at: int, asked: Mapping[str, str]
    ) -> Html:
        found = rows.page(table, query, at)
        kept = {key: value for key, value in asked.items() if value and key != "page"}
        return self._render(
            "rows.html",
            title=f"{self.label(name)}: {file}",
            name=name,
            file=file,
            files=rows.files(self.runs.folder, name),
            measures=table.measures(),
            asked=asked,
            query=query,
            kept=kept,
            found=found,
            live=0,
        )

    def row(self, name: str, file: str, table: Table, at: int, color: str, part: int) -> Html:
        found = rows.row(self.runs.folder, name, file, table, at, color, part)
        place = {"name": name, "file": file, "at": at, "part": part, "rows": table.rows}
        return self._render(
            "row.html",
            title=f"{self.label(name)}: {file} row {at}",
            found=found,
            most=pieces.MOST,
            live=0,
            **place,
        )

    def _render(self, template: str, **facts: Any) -> Html:
        nonce = secrets.token_urlsafe(16)
        text = _templates().get_template(template).render(nonce=nonce, label=self.label, **facts)
        return Html(text, nonce)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader([HERE, Path(events.__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    made.filters |= {"number": _plain(figures.number), "seconds": _plain(figures.seconds), "exact": _exact}
    made.globals |= {"link": link, "titles": STAGE_TITLES, "colors": pieces.COLORS}
    return made


def _plain(show: Callable[[Any], str]) -> Callable[[Any], str]:
    """What is no number, where a file should hold one, is shown as the text it is."""

    def shows(value: Any) -> str:
        try:
            return show(value)
        except UNEXPECTED:
            return shown(str(value))

    return shows


def link(page: str, /, **words: Any) -> str:
    """An address on this server; what has no value is left out."""
    found = {key: str(value) for key, value in words.items() if value not in ("", None)}
    return f"/{page}?{urlencode(found, errors='replace')}" if found else f"/{page}"


def sparkline(points: Sequence[tuple[int, float]], width: int = 96, height: int = 24) -> str:
    """The points of an SVG line, lowest value at the bottom; nothing of fewer than two."""
    points = charts.thinned(points)
    if len(points) < 2:
        return ""
    xs, ys = zip(*points, strict=True)
    across, low = (max(xs) - min(xs)) or 1, min(ys)
    tall = (max(ys) - low) or 1.0
    return " ".join(
        f"{2 + (width - 4) * (x - min(xs)) / across:.1f},{height - 3 - (height - 6) * (y - low) / tall:.1f}"
        for x, y in points
    )


def _sources(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The rows of the table by data source, where there are several; KeyError where one lacks something."""
    parts = (evaluation or {}).get("by_data_source", {})
    names = ("n", "before", "after", "lift")
    rows = [{"name": source, **{name: part[name] for name in names}} for source, part in parts.items()]
    return rows if len(rows) > 1 else []


def _gate(manifests: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each check's verdict and words: of the export where there was one."""
    facts = manifests.get("export", {}).get("facts", {})
    gate = facts.get("gate") or summary.get("gate") or {}
    words = {True: "passed", False: "failed"}
    return [(words.get(line["passed"], "not known"), str(line["why"])) for line in gate.get("lines", [])]


def _exact(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
