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
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics
from rein.types import prompt_text

STAGES = ("sft", "reward", "rollout", "score", "train", "evaluate", "export")  # in the order of the page
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
    page = Page(
        title=f"Rein: {out.name}",
        evaluation=evaluation,
        answers=answers,
        metrics=metrics,
        manifests=manifests,
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
    """What guards said and did, without what a resumed run went through again."""
    return journal.standing(journal.read(folder / "journal.jsonl"))


def _evaluation(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """evaluation.json and the answers with prompts as text; nothing where evaluate was not run."""
    file = folder / "evaluation.json"
    if not file.exists():
        return None, []
    evaluation: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "lift" not in evaluation:  # nothing was generated
        return None, []
    answers = folder / "answers.parquet"
    rows = [row for _, row in read_rows(answers)] if answers.exists() else []
    return evaluation, [row | {"prompt": prompt_text(row["prompt"])} for row in rows]
