"""The model card of an export, README.md: written from the manifests that stages left, never from memory.

What was not run is left out. Pure but for reading those files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rein import manifest
from rein.config import paths
from rein.config.load import resolved
from rein.config.recipe import Recipe
from rein.stages.gate_facts import evaluation_of, trained_here
from rein.tracking.jsonl import read_metrics

CURVES = {
    "val/score": "held-out score",
    "val/proxy_score": "proxy",
    "val/response_length": "tokens per answer",
    "probe/kl_reference": "KL to the start",
    "probe/entropy": "entropy",
}
POINTS = 12  # of a curve
SIDE = {
    "score": "score",
    "accuracy": "greedy accuracy",
    "response_length": "tokens per answer",
    "well_formed": "well-formed answers",
    "repetition": "repeated 4-grams",
    "truncated": "cut off by the limit",
}


def card(recipe: Recipe, source: str, facts: Mapping[str, Any]) -> str:
    """Markdown."""
    trained, making = trained_here(recipe, source), _making(recipe, source)
    parts = [
        "---\nlibrary_name: transformers\ntags: [rein]\n---\n",
        f"# {Path(recipe.out).name}: {facts['kind']}\n",
        *_origin(making, facts),
        "## Gate\n",
        *_gate(facts["gate"]),
        *_evaluation(evaluation_of(recipe, source)),
        *(_curves(trained) if trained else ()),
        *(_made(recipe, making) if making else ()),
    ]
    return "\n".join(parts)


def _making(recipe: Recipe, source: str) -> dict[str, Any] | None:
    """The manifest of the stage of this run folder that wrote `source`; None where none did, or its is not
    there.
    """
    folder = Path(source).resolve().parent
    return manifest.read(folder) if folder.parent == Path(recipe.out).resolve() else None


def _made(recipe: Recipe, making: Mapping[str, Any]) -> Iterator[str]:
    """With what it was made: not with what it is exported."""
    yield from _data(recipe)
    yield "## Recipe\n"
    yield "What differs from the defaults.\n"
    yield f"```json\n{json.dumps(_changed(making['recipe'], resolved(Recipe())), indent=2)}\n```\n"
    yield "## Versions\n"
    yield from _table(("package", "version"), list(making["versions"].items()))


def _origin(making: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> Iterator[str]:
    if making is None:
        yield f"Exported from `{facts['from']}`. Nothing is known of its making."
    else:
        start = making["recipe"]["model"]["path"] or "a model not named"
        yield f"Exported from `{facts['from']}`; started from `{start}`."
    if "base" in facts:
        yield f"These are adapters alone; their base is `{facts['base']}`."
    if "dtype" in facts:
        yield f"Weights are {facts['dtype']}."
    for name, of in (
        ("reload_difference", "the model that was written"),
        ("fused_difference", "its base with adapters not fused"),
    ):
        if name in facts:
            yield f"Loaded again, its logits differ from those of {of} by {facts[name]:.2g} at most."
    yield ""


def _gate(gate: Mapping[str, Any]) -> Iterator[str]:
    if not gate["asked"]:
        yield f"Not asked: {gate['note']}.\n"
        return
    if gate["forced"]:
        yield "**FAILED, and exported by force.**\n"
    else:
        yield "Passed.\n"
    rows = [
        (line["check"], "passed" if line["passed"] else "**failed**", line["why"]) for line in gate["lines"]
    ]
    yield from _table(("check", "", "what was found"), rows)


def _evaluation(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    yield "## Evaluation\n"
    if "off_policy" in found:
        yield from _by_stored_rows(found["off_policy"])
        return
    low, high = found["lift_ci95"]
    yield (
        f"Greedy answers to {found['n']} prompts that training has not seen, judged by "
        f"{', '.join(found['reward'])}: lift {found['lift']:+.4g}, 95 % [{low:+.4g}, {high:+.4g}], "
        f"win rate against the start model {found['win_rate']:.3f}.\n"
    )
    before, after = found["before"], found["after"]
    keys = [*SIDE, *(key for key in after if key.startswith("pass@"))]
    rows = [
        (SIDE.get(key, key), _number(before[key]), _number(after[key]))
        for key in keys
        if isinstance(after.get(key), int | float) and isinstance(before.get(key), int | float)
    ]
    if proxy := found.get("proxy"):
        name = f"proxy ({', '.join(proxy['reward'])})"
        rows.append((name, _number(proxy["before"]), _number(proxy["after"])))
    yield from _table(("", "start", "this model"), rows)
    parts = [(name, part) for name, part in found["by_data_source"].items()]
    parts += [("{} to {} tokens".format(*part["tokens"]), part) for part in found["by_length"]]
    yield from _table(
        ("prompts", "n", "lift", "95 %"),
        [
            (name, part["n"], f"{part['lift']:+.4g}", "[{:+.4g}, {:+.4g}]".format(*part["lift_ci95"]))
            for name, part in parts
        ],
    )


def _by_stored_rows(found: Mapping[str, Any]) -> Iterator[str]:
    """What was estimated without generating, and why it is not to be trusted where it is not."""
    name, sides = found["reported"], {"start": found["before"], "this model": found["after"]}
    yield (
        f"Nothing was generated: estimates ({name}) by {found['rows']} stored answers to {found['prompts']} "
        "prompts that training has not seen.\n"
    )
    if found["trust"]:
        yield "They can be trusted, by what can be seen of it.\n"
    else:
        yield "**They are not to be trusted.**\n"
    rows = [(side, one["estimates"][name], "; ".join(one["reasons"])) for side, one in sides.items()]
    rows.append(("difference", found["difference"][name], ""))
    yield from _table(
        ("", "score", "95 %", "why not to be trusted"),
        [(side, _number(one["score"]), _ends(one["ci95"]), why) for side, one, why in rows],
    )


def _ends(interval: Sequence[float | None]) -> str:
    low, high = ("unknown" if end is None else f"{end:+.4g}" for end in interval)
    return f"[{low}, {high}]"


def _curves(folder: Path) -> Iterator[str]:
    """Training's held-out numbers at a few updates."""
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "val/score" in line]
    if not lines:
        return
    step = max((len(lines) - 1) / (POINTS - 1), 1)
    picked = sorted({min(round(i * step), len(lines) - 1) for i in range(POINTS)})
    names = [name for name in CURVES if any(name in lines[i] for i in picked)]
    yield "## Training\n"
    rows = [(lines[i]["number"], *(_number(lines[i].get(name)) for name in names)) for i in picked]
    yield from _table(("update", *(CURVES[name] for name in names)), rows)


def _data(recipe: Recipe) -> Iterator[str]:
    """Files and models that the stages of this run folder have read, by content."""
    rows = []
    for stage in (stage for stage in manifest.READS if stage != "export"):
        body = manifest.read(paths.stage_dir(recipe, stage)) or {}
        rows += [(stage, f"`{name}`", f"`{digest}`") for name, digest in body.get("inputs", {}).items()]
    if rows:
        yield "## Data and models\n"
        yield from _table(("read by", "what", "sha256"), rows)


def _changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            if inner := _changed(value, defaults[key]):
                found[key] = inner
        elif value != defaults.get(key):
            found[key] = value
    return found


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""
