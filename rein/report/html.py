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

from rein.report import charts, events

MOST_SAMPLES = 24
LONGEST_TEXT = 4000  # characters of an answer that are shown
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
    on_curves = {name: guards[name] for name in ("marks", "undone")} if guards else {}
    return environment.get_template(TEMPLATE).render(
        title=page.title,
        outcome=outcome(page.evaluation),
        comparison=comparison(page.evaluation),
        sources=by_source(page.evaluation),
        drawn=drawn,
        guards=guards,
        chart_data=json_for_script({**drawn, "guards": on_curves}),
        funnel=funnel(page.manifests),
        samples=samples(page.answers),
        answers_total=len(page.answers),
        changed=changed(page.settings, page.defaults),
        settings=json.dumps(page.settings, indent=2, ensure_ascii=False, default=str),
        versions=next((m["versions"] for m in page.manifests.values() if "versions" in m), {}),
        plotly=Markup(get_plotlyjs()),
        nonce=secrets.token_urlsafe(16),
    )


def json_for_script(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def outcome(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The first thing to read: before, after, the lift with its interval, and what that means in words."""
    if evaluation is None:
        return None
    low, high = evaluation["lift_ci95"]
    right_or_wrong = evaluation["before"].get("accuracy") is not None
    verdict, tone = "No proven change", "even"
    if low > 0:
        verdict, tone = "Better", "good"
    elif high < 0:
        verdict, tone = "Worse", "bad"
    left, right = min(low, 0.0), max(high, 0.0)
    pad = 0.1 * (right - left) or 1.0
    spots = {"low": low, "high": high, "zero": 0.0, "lift": evaluation["lift"]}
    place = {name: 100 * (value - left + pad) / (right - left + 2 * pad) for name, value in spots.items()}
    show = percent if right_or_wrong else number
    points = _points if right_or_wrong else _signed
    return {
        "verdict": verdict,
        "tone": tone,
        "measure": "Accuracy" if right_or_wrong else "Mean score",
        "before": show(evaluation["before"]["score"]),
        "after": show(evaluation["after"]["score"]),
        "lift": points(evaluation["lift"]),
        "low": points(low),
        "high": points(high),
        "unit": " points" if right_or_wrong else "",
        "n": evaluation["n"],
        "place": place,
    }


ROWS = {  # key of a side in evaluation.json -> name, whether it is a share
    "accuracy": ("Greedy accuracy", True),
    "score": ("Mean score", False),
    "response_length": ("Tokens per answer", False),
    "repetition": ("Repeated 4-grams", True),
    "truncated": ("Cut off by the limit", True),
}


def comparison(evaluation: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The before/after table; pass@k rows after the accuracy, the score only where it is not the accuracy."""
    if evaluation is None:
        return []
    before, after = evaluation["before"], evaluation["after"]
    right_or_wrong = before.get("accuracy") is not None
    passes = [key for key in before if key.startswith("pass@")]
    keys = ["accuracy", *passes] if right_or_wrong else ["score"]
    rows = []
    for key in [*keys, "response_length", "repetition", "truncated"]:
        if key not in before or key not in after:
            continue
        name, share = ROWS.get(key, (key, True))
        show = percent if share else number
        difference = after[key] - before[key]
        row = {"name": name, "before": show(before[key]), "after": show(after[key])}
        row["difference"] = _points(difference) if share else _signed(difference)
        for side, facts in (("before", before), ("after", after)):
            interval = facts.get(f"{key}_ci95")
            row[f"{side}_interval"] = f"{100 * interval[0]:.1f} to {percent(interval[1])}" if interval else ""
        rows.append(row)
    return rows


def by_source(evaluation: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """One row per data source; none where there is only one."""
    parts = (evaluation or {}).get("by_data_source", {})
    return [{"name": name, **part} for name, part in parts.items()] if len(parts) > 1 else []


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


def shown(value: Any) -> str:
    """Text as it may stand on a page: not too long, without control characters and halves of characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = len(text) - LONGEST_TEXT
    text = text[:LONGEST_TEXT] + (f" … ({cut} more characters)" if cut > 0 else "")
    text = "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0x9F else "\ufffd" for c in text)
    return text.encode("utf-8", "replace").decode("utf-8")


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


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _signed(value: float) -> str:
    return f"{value:+.4g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    whole = round(value)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{value:.1f} s"
