"""What the other stages left in the run folder -> `<out>/report.html`, one page that opens without network.

Stages that were not run are left out of the page. Reads results only: no model, no training data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rein import journal, manifest
from rein.config import paths
from rein.config.load import resolved
from rein.config.recipe import Recipe
from rein.data.files import atomic
from rein.data.parquet import read_rows
from rein.errors import DataError
from rein.report.html import Page, render
from rein.report.tokens import spread
from rein.stages import gate_facts, rounds, token_records
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics
from rein.types import prompt_text

STAGES = ("sft", "reward", "rollout", "score", "train", "evaluate", "export")  # in the order of the page
AFTER_ROUNDS = ("train", "evaluate", "export")
WITH_METRICS = ("sft", "reward", "train")


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Write the page; raises DataError where no stage has left anything."""
    out = Path(recipe.out)
    folders = {stage: paths.stage_dir(recipe, stage) for stage in STAGES}
    found = {stage: manifest.read(folder) for stage, folder in folders.items()}
    manifests = {stage: body for stage, body in found.items() if body is not None}
    metrics = {stage: read_metrics(folders[stage] / "metrics.jsonl") for stage in WITH_METRICS}
    evaluation, answers = _evaluation(folders["evaluate"])
    if not manifests and evaluation is None and not any(metrics.values()):
        raise DataError(f"{out}: no stage has left results here; run `rein run` with this recipe first")
    before = {stage: body for stage, body in manifests.items() if stage not in AFTER_ROUNDS}
    in_order = before | _rounds(recipe) | manifests
    page = Page(
        title=f"Rein: {out.name}",
        evaluation=evaluation,
        answers=answers,
        metrics=metrics,
        manifests=in_order,
        rounds=rounds.current(recipe).number,
        gate=_gate(recipe, evaluation is not None),
        trajectories=_trajectories(folders["train"] / token_records.FOLDER, console),
        journal=_events(folders["train"]) if "train" in manifests or metrics["train"] else None,
        settings=resolved(recipe),
        defaults=resolved(Recipe()),
    )
    target = out / "report.html"
    with atomic(target) as draft:
        draft.write_text(render(page), encoding="utf-8", errors="replace")
    console.say(f"report: {target}")
    return {"report": str(target), "stages": list(manifests)}


def _events(folder: Path) -> list[dict[str, Any]]:
    """What guards said and did, without what a resumed run went through again; with each call for a round of
    fresh rollouts that the run has then gone on from, which undid nothing.
    """
    lines = journal.read(folder / "journal.jsonl")
    resumes = [line for line in lines if line["kind"] == journal.RESUME]
    standing = {line["seq"] for line in journal.standing(lines)}
    asked = {
        line["seq"]
        for line in lines
        if (line["kind"], line.get("action")) == ("end", "refresh")
        and all(later["number"] >= line["number"] for later in resumes if later["seq"] > line["seq"])
    }
    return [line for line in lines if line["seq"] in standing | asked]


def _rounds(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Manifests of the stages that made rows for rounds of fresh rollouts, in order."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(1, rounds.current(recipe).number + 1):
        for stage in rounds.MAKING:
            body = manifest.read(rounds.actor_folder(recipe, number).parent / stage)
            found |= {f"round {number}: {stage}": body} if body is not None else {}
    return found


def _gate(recipe: Recipe, evaluated: bool) -> dict[str, Any] | None:
    """What the gate says now of what was or would be exported; None where nothing was evaluated."""
    exported = (manifest.read(paths.stage_dir(recipe, "export")) or {}).get("facts", {})
    if not evaluated and not exported:
        return None
    source = exported.get("from") or recipe.evaluate.after or paths.trained_actor(recipe)
    forced = bool(exported.get("gate", {}).get("forced"))
    return gate_facts.pass_gate(recipe, source, Console(quiet=True)).as_json(forced=forced)


def _trajectories(folder: Path, console: Console) -> list[dict[str, Any]]:
    """The token records of some batches; a file that cannot be read is passed over."""
    rows: list[dict[str, Any]] = []
    for file in spread(sorted(folder.glob("*.parquet"))):
        try:
            rows += [row for _, row in read_rows(file)]
        except DataError as error:
            console.say(f"warning: {error}")
    return rows


def _evaluation(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """evaluation.json and the answers with prompts as text; nothing where evaluate was not run."""
    file = folder / "evaluation.json"
    if not file.exists():
        return None, []
    evaluation: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    answers = folder / "answers.parquet"
    rows = [row for _, row in read_rows(answers)] if answers.exists() else []
    return evaluation, [row | {"prompt": prompt_text(row["prompt"])} for row in rows]
