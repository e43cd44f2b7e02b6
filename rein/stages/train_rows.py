"""The rows a training run reads: loaded, split, chosen, and held against what the recipe needs of them.

Part of stages/train.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from rein.config import paths
from rein.config.methods import DATA_NEEDS, methods_for, needs
from rein.config.recipe import Recipe
from rein.data.batches import over_budget_note
from rein.data.groups import by_prompt, select
from rein.data.loader import load_demonstrations, load_trajectories, write_rejects
from rein.data.mixing import Mixing
from rein.data.split import holdout, prompt_key
from rein.data.tokenize import Encoder
from rein.errors import ConfigError, DataError
from rein.functional.rewards import score_statistics
from rein.runtime.seeding import derive
from rein.tracking.console import Console
from rein.types import Trajectory


@dataclasses.dataclass(slots=True)
class Rows:
    """The rows of the run and where the others went."""

    train: list[Trajectory]
    held_out: list[Trajectory]
    counts: dict[str, int]
    demonstrations: Mixing | None = None  # beside the actor's updates


def load_rows(recipe: Recipe, console: Console, encoder: Encoder, folder: Path | None) -> Rows:
    files = paths.train_files(recipe)
    loaded = load_trajectories(files, encoder, recipe.data, scored=True, ranked="pairs" in needs(recipe))
    for note in loaded.notes:
        console.say(f"data: {note}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_rejects(folder / "rejects.jsonl", loaded.rejects)
    train, held_out = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.seed, "holdout"))
    counts = {"in": loaded.total, "rejected": len(loaded.rejects), "held_out": len(held_out)}
    _serves(recipe, files[0], loaded.rows)
    train, left_out = select(
        train,
        files[0],
        threshold=recipe.algorithm.filter_threshold,
        spread=recipe.algorithm.filter_groups.enable,
        paired="pairs" in needs(recipe),
    )
    counts |= left_out
    counts["trained"] = len(train)
    if recipe.actor.use_dynamic_bsz:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in train]
        budget = recipe.actor.ppo_max_token_len_per_gpu
        for note in over_budget_note(
            [row.where for row in train], lengths, budget, "actor.ppo_max_token_len_per_gpu"
        ):
            console.say(f"warning: {note}")
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    console.say(f"rows: {said}")
    if folder is not None and recipe.data.train_batch_size > len(train):
        raise ConfigError(
            f"data.train_batch_size {recipe.data.train_batch_size} is larger than the {len(train)} rows "
            f"to train on ({said}); set it to {len(train)} or less"
        )
    return Rows(train, held_out, counts)


def load_mixing(
    recipe: Recipe, console: Console, encoder: Encoder, held_out: list[Trajectory], folder: Path | None
) -> Mixing | None:
    """What sft.share takes from, less the answers to prompts that are held out; None where it is off."""
    sft, files = recipe.sft, paths.mixed_files(recipe)
    if not files:
        return None
    loaded = load_demonstrations(
        files, encoder, recipe.data, prompt_key=sft.prompt_key, response_key=sft.response_key
    )
    for note in loaded.notes:
        console.say(f"sft.files: {note}")
    if folder is not None:
        write_rejects(folder / "demonstrations_rejects.jsonl", loaded.rejects)
    held = {prompt_key(row.prompt_ids) for row in held_out}
    rows = [row for row in loaded.rows if prompt_key(row.prompt_ids) not in held]
    if not rows:
        raise DataError(f"{files[0]}: every prompt of sft.files is held out; give other demonstrations")
    console.say(
        f"sft.share {sft.share:g}: {loaded.total} demonstrations in, {len(loaded.rejects)} rejected, "
        f"{len(loaded.rows) - len(rows)} of held-out prompts, {len(rows)} mixed in"
    )
    return Mixing(rows, sft.share, seed=derive(recipe.seed, "demonstrations"), shuffle=recipe.data.shuffle)


def _has(rows: list[Trajectory]) -> frozenset[str]:
    """Which of DATA_NEEDS all rows meet (of groups and pairs: whether there are any)."""
    groups = by_prompt(rows)
    met = {
        "behavior": all(row.behavior_log_probs is not None for row in rows),
        "groups": any(len(group) > 1 for group in groups),
        "baseline_score": all(row.baseline_score is not None for row in rows),
        "pairs": any(len({rows[i].score for i in group}) > 1 for group in groups),
    }
    return frozenset(name for name, value in met.items() if value)


def _serves(recipe: Recipe, file: str, rows: list[Trajectory]) -> None:
    """Raise DataError where the recipe asks for what the rows do not have, with the methods they serve."""
    has = _has(rows)
    lacking = [name for name in DATA_NEEDS if name in needs(recipe) - has]
    if lacking:
        partly = ""
        if "behavior" in lacking:
            without = sum(row.behavior_log_probs is None for row in rows)
            partly = f" ({without} of {len(rows)} rows have none)"
        raise DataError(
            f"{file}: this recipe needs {DATA_NEEDS[lacking[0]]}{partly}; store them, or choose what the "
            f"rows can serve with algorithm.method={'|'.join(methods_for(has))} and rollout_is=null or auto"
        )


def corrects(recipe: Recipe, console: Console, rows: list[Trajectory]) -> bool:
    """Whether old / behavior weighs or rejects tokens; `auto` follows the data, and says so."""
    wanted = recipe.algorithm.rollout_correction
    if wanted.bypass_mode:
        console.say(f"rollout_correction: bypass mode, {wanted.loss_type} against the behavior policy")
        return True
    if wanted.rollout_is is None and wanted.rollout_rs is None:
        return False
    known = sum(row.behavior_log_probs is not None for row in rows)
    if 0 < known < len(rows):
        raise DataError(
            f"{paths.train_files(recipe)[0]}: {len(rows) - known} of {len(rows)} rows have no "
            "behavior_log_probs; leave those rows out, or set data.behavior=unknown"
        )
    if not known:
        console.say("rollout_correction: auto -> none, the behavior policy is unknown")
        return False
    said = []
    if wanted.rollout_is is not None:
        level = "token" if wanted.rollout_is == "auto" else wanted.rollout_is
        bound = f"truncated at {wanted.rollout_is_threshold}"
        if isinstance(wanted.rollout_is_threshold, str):
            bound = f"0 outside {wanted.rollout_is_threshold.replace('_', ' to ')}"
        said.append(f"{wanted.rollout_is} -> {level} weights old / behavior, {bound}")
    if wanted.rollout_rs is not None:
        said.append(f"rejection by {wanted.rollout_rs} at {wanted.rollout_rs_threshold}")
    console.say(f"rollout_correction: {'; '.join(said)}")
    return True


def score_statistics_of(
    recipe: Recipe, console: Console, rows: list[Trajectory]
) -> tuple[float, float] | None:
    """Mean and spread of all training scores, made once: what reward_manager.normalize divides by."""
    if recipe.reward_manager.normalize is None:
        return None
    found = score_statistics(torch.tensor([float(row.score or 0.0) for row in rows], dtype=torch.float64))
    console.say(f"reward_manager.normalize: scores have mean {found[0]:.4g} and std {found[1]:.4g}")
    return found
