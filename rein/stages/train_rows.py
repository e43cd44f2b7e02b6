"""The rows a training run reads: loaded, split, chosen, and held against what the recipe needs of them.

Part of stages/train.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from rein.config import paths
from rein.config.methods import needs, reads_scores
from rein.config.recipe import Recipe
from rein.config.rules import kl_coefs
from rein.data.batches import over_budget_note
from rein.data.groups import refuse_lacking, select
from rein.data.loader import (
    load_demonstrations,
    load_trajectories,
    rejects_kept,
    write_rejects,
)
from rein.data.mixing import Mixing
from rein.data.split import holdout, prompt_key
from rein.data.tokenize import Encoder
from rein.errors import ConfigError, DataError
from rein.functional.kl import OFF_POLICY
from rein.functional.rewards import score_statistics
from rein.runtime.seeding import derive
from rein.stages.leave_out import without_prompts
from rein.tracking.console import Console
from rein.types import Trajectory


@dataclasses.dataclass(slots=True)
class Rows:
    """The rows of the run and where the others went."""

    train: list[Trajectory]
    held_out: list[Trajectory]
    counts: dict[str, int]
    demonstrations: Mixing | None = None  # beside the actor's updates
    marks: dict[str, str] = dataclasses.field(default_factory=dict)  # what the ids are of


def content(rows: Sequence[Trajectory]) -> str:
    """A hash of all that training reads of the rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.key} {row.score} {row.baseline_score} {row.finish_reason} {row.group}".encode())
        for array in (row.response_mask, row.token_level_scores, row.behavior_log_probs):
            digest.update(b"-" if array is None else array.tobytes())
    return digest.hexdigest()


def load_rows(
    recipe: Recipe,
    console: Console,
    encoder: Encoder,
    folder: Path | None,
    complete: Callable[[list[Trajectory]], list[Trajectory]],  # adds what the file lacks to its rows
    kept: Path | None = None,  # the rows that the first round held out
) -> Rows:
    files = paths.train_files(recipe)
    with rejects_kept(folder and folder / "rejects.jsonl"):
        loaded = load_trajectories(
            files, encoder, recipe.data, scored=reads_scores(recipe), ranked="pairs" in needs(recipe)
        )
    for note in loaded.notes:
        console.say(f"data: {note}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_rejects(folder / "rejects.jsonl", loaded.rejects)
    if folder is None and "pairs" in needs(recipe):  # a rehearsal's few rows need not score differently
        loaded.rows = [row.with_score(float(i % 2)) for i, row in enumerate(loaded.rows)]
    known = without_prompts(loaded.rows, recipe, encoder)
    left_out = {"left_out": len(loaded.rows) - len(known)} if recipe.data.leave_out else {}
    loaded.rows = complete(known)
    if kept is None:
        seed = derive(recipe.data_seed, "holdout")
        train, held_out = holdout(loaded.rows, recipe.data.holdout_fraction, seed)
    else:
        anyone = recipe.data.model_copy(update={"behavior": None})  # whether their log-probs are known or not
        held_out = complete(load_trajectories([str(kept)], encoder, anyone).rows)
        train = _of_other_prompts(loaded.rows, held_out)
    counts = {
        "in": loaded.total,
        "rejected": len(loaded.rejects),
        **left_out,
        "held_out": len(loaded.rows) - len(train),
    }
    refuse_lacking(recipe, files[0], loaded.rows)
    train, unused = select(
        train,
        files[0],
        threshold=recipe.algorithm.filter_threshold,
        spread=recipe.algorithm.filter_groups.enable,
        paired="pairs" in needs(recipe),
    )
    counts |= unused
    counts["trained"] = len(train)
    _warn(recipe, console, train)
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    console.say(f"rows: {said}")
    if folder is not None:
        rows_vary = kept is not None or recipe.trainer.refresh_every > 0  # from round to round
        _refuse_few(recipe, console, train, held_out, said, rows_vary=rows_vary)
    return Rows(train, held_out, counts)


def _refuse_few(
    recipe: Recipe,
    console: Console,
    train: list[Trajectory],
    held_out: list[Trajectory],
    counted: str,
    *,
    rows_vary: bool,
) -> None:
    """Raise where there are fewer rows than a batch, or none for the probe that a controller reads."""
    size, there = recipe.data.train_batch_size, len(train)
    if size > there and not (train and rows_vary):
        raise ConfigError(
            f"data.train_batch_size {size} is larger than the {there} rows to train on ({counted}); set it "
            f"to {there} or less, or give more prompts (at least 64 are held out: data.holdout_fraction)"
        )
    if size > there:
        console.say(f"rows: {there} are a batch, fewer than data.train_batch_size")
    control = recipe.algorithm.kl_ctrl.type
    if control in ("adaptive", "moving_average") and not held_out:
        raise DataError(
            f"{paths.train_files(recipe)[0]}: algorithm.kl_ctrl.type {control} reads a probe of held-out "
            "rows, and none is held out; give more prompts, raise data.holdout_fraction, or write fixed"
        )


def _of_other_prompts(rows: list[Trajectory], others: list[Trajectory]) -> list[Trajectory]:
    keys = {prompt_key(row.prompt_ids) for row in others}
    return [row for row in rows if prompt_key(row.prompt_ids) not in keys]


def without(rows: list[Trajectory], excluded: Collection[str]) -> list[Trajectory]:
    """The rows; those whose key is in `excluded` stay with nothing counted, so that plans stay too."""
    if not excluded:
        return rows
    return [
        dataclasses.replace(row, response_mask=np.zeros_like(row.response_mask))
        if row.key in excluded
        else row
        for row in rows
    ]


def _warn(recipe: Recipe, console: Console, train: list[Trajectory]) -> None:
    """Say what is odd about the rows to train on."""
    if reads_scores(recipe) and len({row.score for row in train}) == 1:
        console.say(
            f"warning: all {len(train)} rows to train on score {train[0].score:g}, so none is better than "
            "another; does the reward fit these responses?"
        )
    if recipe.actor.use_dynamic_bsz:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in train]
        budget = recipe.actor.token_budget
        for note in over_budget_note(
            [row.where for row in train], lengths, budget, "actor.ppo_max_token_len_per_gpu"
        ):
            console.say(f"warning: {note}")


def load_mixing(
    recipe: Recipe, console: Console, encoder: Encoder, held_out: list[Trajectory], folder: Path | None
) -> Mixing | None:
    """What sft.share takes from, less the answers to prompts that are held out; None where it is off."""
    sft, files = recipe.sft, paths.mixed_files(recipe)
    if not files:
        return None
    with rejects_kept(folder and folder / "demonstrations_rejects.jsonl"):
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
    return Mixing(
        rows, sft.share, seed=derive(recipe.data_seed, "demonstrations"), shuffle=recipe.data.shuffle
    )


def corrects(recipe: Recipe, console: Console, rows: list[Trajectory]) -> bool:
    """Whether old / behavior weighs or rejects tokens; `auto` follows the data, and says so.

    Raises DataError where only some of the rows have what the correction, or the KL loss, reads.
    """
    wanted, actor = recipe.algorithm.rollout_correction, recipe.actor
    known = sum(row.behavior_log_probs is not None for row in rows)
    correcting = wanted.bypass_mode or wanted.rollout_is is not None or wanted.rollout_rs is not None
    weighing = actor.use_kl_loss and actor.kl_loss_type in (None, OFF_POLICY)
    if 0 < known < len(rows) and (correcting or weighing):
        raise DataError(
            f"{paths.train_files(recipe)[0]}: {len(rows) - known} of {len(rows)} rows have no "
            "behavior_log_probs; leave those rows out, or set data.behavior=unknown"
        )
    if "reference" in needs(recipe):
        console.say(f"KL: {kl_coefs(recipe, known=bool(known)).note}")
    if wanted.bypass_mode:
        console.say(f"rollout_correction: bypass mode, {wanted.loss_type} against the behavior policy")
        return True
    if not correcting:
        return False
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
