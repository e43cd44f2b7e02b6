"""The report: one HTML file that opens without network. What a run left behind in, text of the page out.

Plotly's script is inlined once. Everything a model said is shown as text: the template escapes, and the
page's content policy lets no script run but its own two. Knows no stage and reads no file but its template.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rein.report import charts, evaluation, events, gate, tokens
from rein.report.figures import number, percent, seconds
from rein.report.text import shown

MOST_SAMPLES = 24
TEMPLATE = "page.html"


@dataclass(slots=True)
class Page:
    """What there is to show; whatever is missing is left out of the page."""

    title: str
    evaluation: Mapping[str, Any] | None = None  # evaluation.json
    answers: Sequence[Mapping[str, Any]] = ()  # rows of answers.parquet, prompts as text
    metrics: Mapping[str, Sequence[dict[str, Any]]] = field(
        default_factory=dict
    )  # stage -> lines of metrics.jsonl
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # stage -> manifest.json
    rounds: int = 0  # of fresh rollouts
    gate: Mapping[str, Any] | None = None  # what it said of the model, as summary.json holds it
    trajectories: Sequence[Mapping[str, Any]] = ()  # rows of token records
    journal: Sequence[Mapping[str, Any]] | None = None  # its standing lines; None: nothing was trained
    settings: Mapping[str, Any] = field(default_factory=dict)  # the resolved recipe
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what it would be without a recipe


def render(page: Page) -> str:
    """The whole page as HTML."""
    from plotly.offline import get_plotlyjs  # takes a moment: only when a page is made

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": number, "percent": percent, "seconds": seconds}
    drawn = {stage: charts.draw(stage, page.metrics.get(stage, [])) for stage in charts.CHARTS}
    guards = None if page.journal is None else events.section(page.journal)
    moved = tokens.section(page.trajectories)
    on_curves = {name: guards[name] for name in ("marks", "undone")} if guards else {}
    text = environment.get_template(TEMPLATE).render(
        title=page.title,
        outcome=evaluation.outcome(page.evaluation),
        comparison=evaluation.comparison(page.evaluation),
        wins=evaluation.wins(page.evaluation),
        parts=evaluation.parts(page.evaluation),
        stored=evaluation.stored_answers(page.evaluation),
        gate=gate.section(page.gate),
        tokens=moved,
        token_data=json_for_script(moved),
        drawn=drawn,
        guards=guards,
        chart_data=json_for_script({**drawn, "guards": on_curves}),
        funnel=funnel(page.manifests),
        rounds=page.rounds,
        samples=samples(page.answers),
        answers_total=len(page.answers),
        changed=changed(page.settings, page.defaults),
        settings=json.dumps(page.settings, indent=2, ensure_ascii=False, default=str),
        versions=next((m["versions"] for m in page.manifests.values() if "versions" in m), {}),
        plotly=Markup(get_plotlyjs()),
        nonce=secrets.token_urlsafe(16),
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # halves of characters, of settings or titles


def json_for_script(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def funnel(manifests: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per stage: rows in, rejected, what became of the rest, and the time it took."""
    found = []
    for stage, manifest in manifests.items():
        rows = dict(manifest.get("rows", {}))
        total, rejected = rows.pop("in", None), rows.pop("rejected", None)
        rest = [(name.replace("_", " "), count) for name, count in rows.items()]
        found.append(
            {
                "stage": stage,
                "in": total,
                "rejected": rejected,
                "rest": rest,
                "seconds": manifest.get("seconds"),
                "share": 100 * rejected / total if total and rejected else 0,
            }
        )
    return found


def samples(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answers to read: those that moved up most, those that moved down most, then some that did not move."""
    order = sorted(answers, key=lambda row: row["after_score"] - row["before_score"])
    down = [row for row in order if row["after_score"] < row["before_score"]]
    up = [row for row in reversed(order) if row["after_score"] > row["before_score"]]
    same = [row for row in order if row["after_score"] == row["before_score"]]
    third = MOST_SAMPLES // 3
    return [_sample(row) for row in (*up[:third], *down[:third], *same[:third])]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    moved = row["after_score"] - row["before_score"]
    word, tone = ("better", "good") if moved > 0 else ("worse", "bad") if moved < 0 else ("same", "even")
    truth = row.get("ground_truth")
    return {
        "word": word,
        "tone": tone,
        "prompt": shown(row["prompt"]),
        "truth": "" if truth is None else shown(truth),
        "before": shown(row["before"]),
        "after": shown(row["after"]),
        "before_score": number(row["before_score"]),
        "after_score": number(row["after_score"]),
    }


def changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The settings that differ from the defaults, as dotted keys."""
    flat, usual = _flat(settings), _flat(defaults)
    return [(key, _setting(value)) for key, value in flat.items() if key not in usual or usual[key] != value]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
