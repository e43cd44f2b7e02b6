"""The loop that SFT and reward modelling share: steps of one optimizer, logged, saved, resumed. Not a verb.

Knows nothing of the loss: `backward(step)` leaves gradients and says its metrics.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rein.config.recipe import Recipe
from rein.errors import CheckpointError, GuardStop, Interrupted
from rein.runtime.interrupt import deferred
from rein.runtime.optimizer import Optimizer
from rein.snapshots import RunState, Snapshots
from rein.tracking.console import Console
from rein.tracking.fanout import open_trackers
from rein.types import Metrics

LOSS_KEY = "train/loss"


def descend(
    backward: Callable[[int], Metrics],  # step -> metrics, with gradients left in place
    optimizer: Optimizer,
    *,
    recipe: Recipe,
    console: Console,
    folder: Path,
    what: str,  # the verb, for messages
    total: int,
    save_freq: int,
    settings: dict[str, Any],  # what a resumed run must share
) -> Metrics:
    """Run steps up to `total`, from the newest snapshot of the same settings.

    Raises GuardStop when the loss or gradient is not finite, Interrupted after a signal, CheckpointError when
    the snapshot was made with other settings.
    """
    snapshots = Snapshots(folder / "snapshots", kind=what, keep=1)
    mark = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    _resume(recipe, console, snapshots, optimizer, what, mark)
    tracker = open_trackers(recipe.trainer.logger, folder, from_number=optimizer.step)
    metrics: Metrics = {}

    def save() -> None:
        tensors, meta = optimizer.state()
        snapshots.save(optimizer.step, RunState(tensors, {"optimizer": meta, "settings": mark}))

    try:
        with deferred() as interrupt, console.progress(total, what) as advance:
            advance(optimizer.step)
            while optimizer.step < total:
                metrics = backward(optimizer.step)
                metrics["train/lr"] = optimizer.lr
                norm = metrics["train/grad_norm"] = optimizer.grad_norm()
                if not (math.isfinite(norm) and math.isfinite(metrics[LOSS_KEY])):
                    raise GuardStop(
                        f"{what}: step {optimizer.step + 1} has loss {metrics[LOSS_KEY]} "
                        f"and gradient norm {norm}; "
                        "lower the learning rate or check the rows"
                    )
                optimizer.apply(norm)
                tracker.log(metrics, optimizer.step)
                advance(1, f"loss {metrics[LOSS_KEY]:.4f}")
                if interrupt:
                    save()
                    raise Interrupted(
                        f"{what}: stopped after step {optimizer.step} of {total}, state saved; "
                        "the same command goes on from here",
                        interrupt.signal_number,
                    )
                if save_freq > 0 and optimizer.step % save_freq == 0 and optimizer.step < total:
                    save()
    finally:
        tracker.close()
    return metrics


def forget(folder: Path) -> None:
    """The stage is finished: drop its snapshots, so that other settings may follow in this folder."""
    Snapshots(folder / "snapshots").clear()


def _resume(
    recipe: Recipe, console: Console, snapshots: Snapshots, optimizer: Optimizer, what: str, mark: str
) -> None:
    if recipe.resume == "never":
        snapshots.clear()
        return
    # A path names a snapshot of train; these short stages always take their own newest.
    state, passed_over = snapshots.newest()
    for line in passed_over:
        console.say(f"resume: {line} passed over")
    if state is None:
        return
    if state.meta["settings"] != mark:
        raise CheckpointError(
            f"{snapshots.folder}: an unfinished run with other settings or rows; use the same recipe, "
            "another out=, or start anew with resume=never"
        )
    optimizer.restore(state.tensors, state.meta["optimizer"])
    snapshots.drop_after(optimizer.step)  # broken ones, or they would count as the newest
    console.say(f"resume: {what} from step {optimizer.step}")


def rows_mark(keys: list[bytes]) -> str:
    """One hash for the rows of a run, in order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(hashlib.sha256(key).digest())
    return digest.hexdigest()


def ones(rows: int) -> torch.Tensor:
    """Temperature 1 for every row: supervised losses are of the untempered model."""
    return torch.ones(rows)
