"""The rehearsal of `rein check --try`: a few real rows through the recipe's stages, in a folder thrown away.

Stages before train are made small (two steps, short answers), so that train finds rows; train makes two
updates of each model on 16 of them. Nothing outside of that folder is written. Part of commands/check.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rein.config import paths
from rein.config.recipe import FilterGroups, Recipe
from rein.data.parquet import read_rows
from rein.stages import pipeline, train
from rein.stages.process import prepare_process
from rein.tracking.console import Console
from rein.types import Metrics

ROWS = 16  # that train updates on
TAKEN = 2 * ROWS  # of each file: some may be bad
ANSWER_TOKENS = 32
STAGES = ("sft", "reward", "rollout", "score", "train")  # the others need a trained model


def rehearse(recipe: Recipe, console: Console) -> Metrics:
    """What train measured, or nothing where the recipe does not train."""
    beside = Path(recipe.out).expanduser().absolute()
    while not beside.exists():
        beside = beside.parent
    metrics: Metrics = {}
    with tempfile.TemporaryDirectory(prefix=".rein-try-", dir=beside) as folder:
        small = made_small(recipe, Path(folder))
        for stage in recipe.stages:
            if stage == "train":
                prepare_process(small)
                metrics = train.rehearse(small, console)
            elif stage in STAGES:
                pipeline.run_stage(stage, small, console)
    return metrics


def made_small(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with the first rows of its files, written into `folder`, and little to do."""
    readers = {
        "sft": (recipe.sft, paths.sft_files),
        "reward": (recipe.reward, paths.reward_files),
        "rollout": (recipe.rollout, paths.rollout_files),
        "score": (recipe.score, paths.score_files),
    }
    n, room = min(recipe.rollout.n, 2), recipe.rollout.max_new_tokens or recipe.data.max_response_length
    changes = {
        "sft": {"batch_size": min(recipe.sft.batch_size, ROWS // 4), "total_steps": 2},
        "reward": {"batch_size": min(recipe.reward.batch_size, ROWS // 2), "epochs": 1},
        "rollout": {"n": n, "max_prompts": ROWS // n, "max_new_tokens": min(room, ANSWER_TOKENS)},
        "score": {},
    }
    update: dict[str, Any] = {"out": str(folder / "run"), "resume": "never", "cache": None}
    update |= {"runtime": "single", "nproc": 1, "nnodes": 1}
    for stage, (section, files_of) in readers.items():
        change: dict[str, Any] = dict(changes[stage])
        needed = stage in recipe.stages or (stage == "sft" and recipe.sft.share > 0)
        if needed and not _made_here(recipe, files := files_of(recipe)):
            change["files"] = [_first_rows(files, folder / stage)]
        update[stage] = section.model_copy(update=change)
    data: dict[str, Any] = {"train_batch_size": TAKEN, "max_bad_fraction": 1.0, "holdout_fraction": 0.0}
    data["val_files"] = []
    if "train" in recipe.stages and not _made_here(recipe, files := paths.train_files(recipe)):
        data["train_files"] = [_first_rows(files, folder / "train")]
    mini = {"ppo_mini_batch_size": min(recipe.actor.ppo_mini_batch_size, ROWS // 2)}
    update["data"] = recipe.data.model_copy(update=data)
    update["actor"] = recipe.actor.model_copy(update=mini)
    update["critic"] = recipe.critic.model_copy(update={"ppo_mini_batch_size": None})
    update["algorithm"] = recipe.algorithm.model_copy(
        update={"filter_threshold": None, "filter_groups": FilterGroups(enable=False)}
    )
    return recipe.model_copy(update=update)


def _made_here(recipe: Recipe, files: Sequence[str]) -> bool:
    """Whether an earlier stage of the recipe writes these."""
    return any(pipeline.made_by(recipe, name) in recipe.stages for name in files)


def _first_rows(files: Sequence[str], folder: Path) -> str:
    """The first rows as one JSON-lines file named after the first file."""
    folder.mkdir()
    target = folder / f"{Path(files[0]).name}.jsonl"
    with target.open("w", encoding="utf-8") as out:
        for _, row in islice(read_rows(list(files), bad=lambda where, reason: None), TAKEN):
            out.write(json.dumps(row, default=str) + "\n")
    return str(target)
