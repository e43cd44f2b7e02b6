"""The loop that SFT and reward modelling share: steps of one optimizer, logged, saved, resumed. Not a verb.

Knows nothing of the loss, which leaves gradients and says its metrics.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rein.config.recipe import Optim, Recipe
from rein.errors import CheckpointError, GuardStop, Interrupted
from rein.protocols import Mesh
from rein.runtime.interrupt import deferred
from rein.runtime.optimizer import Optimizer
from rein.snapshots import RunState, Snapshots
from rein.stages.team import Team
from rein.stages.tracked import trackers_of
from rein.tracking.console import Console
from rein.types import Metrics

LOSS_KEY, TOKENS_KEY = "train/loss", "perf/total_num_tokens"


Loss = Callable[[Any, Sequence[Any], int, Mesh], Metrics]  # model, rows, token budget, ranks


class Pupil:
    """A model under one loss, with its optimizer: on every rank."""

    def __init__(
        self,
        team: Team,
        role: str,
        loss: Loss,
        optim: Optim,
        *,
        grad_clip: float,
        total: int,
        budget: int,
        measure: Loss | None = None,
    ) -> None:
        self.team, self.model = team, team.models[role]
        self.loss, self.budget, self.measured_by = loss, budget, measure
        self.optimizer = Optimizer(self.model.model, optim, grad_clip=grad_clip, total_steps=total)
        team.learner = self

    def backward(self, rows: Sequence[Any]) -> Metrics:
        """Gradients of a batch, and its metrics; weights untouched."""
        metrics = self.loss(self.model, rows, self.budget, self.team.share)
        return metrics | {"train/lr": self.optimizer.lr, "train/grad_norm": self.optimizer.grad_norm()}

    def apply(self, norm: float) -> None:
        self.optimizer.apply(norm)

    def measure(self, rows: Sequence[Any]) -> Metrics:
        """What is said of rows without training on them."""
        assert self.measured_by is not None
        return self.measured_by(self.model, rows, self.budget, self.team.share)

    def done(self) -> int:
        """Steps made."""
        return self.optimizer.step

    def meta(self) -> dict[str, Any]:
        """The part of state() that is JSON."""
        return self.state()[1]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return self.optimizer.state()

    def restore(self, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        self.optimizer.restore(tensors, meta)


def descend(
    team: Team,
    pupil: Pupil,
    rows_of: Callable[[int], Sequence[Any]],  # the batch of a step
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
    snapshots = Snapshots(folder / "snapshots", kind=what, keep=1, write=team.write)
    mark = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    _resume(recipe, console, snapshots, team, what, mark)
    step = pupil.done()
    tracker = trackers_of(recipe, console, folder, step)
    metrics: Metrics = {}

    def save() -> None:
        tensors, meta = team.state()
        snapshots.save(step, RunState(tensors, {"optimizer": meta, "settings": mark}))

    try:
        with deferred() as interrupt, console.progress(total, what, step) as advance:
            while step < total:
                began = time.monotonic()
                metrics = pupil.backward(rows_of(step))
                norm = metrics["train/grad_norm"]
                if not (math.isfinite(norm) and math.isfinite(metrics[LOSS_KEY])):
                    raise GuardStop(
                        f"{what}: step {step + 1} has loss {metrics[LOSS_KEY]} "
                        f"and gradient norm {norm}; "
                        "lower the learning rate or check the rows"
                    )
                pupil.apply(norm)
                step += 1
                pace = metrics.get(TOKENS_KEY, math.nan) / (time.monotonic() - began)
                tracker.log(metrics | ({"perf/throughput": pace} if pace == pace else {}), step)
                advance(1, f"loss {metrics[LOSS_KEY]:.4f}")
                if interrupt:
                    save()
                    raise Interrupted(
                        f"{what}: stopped after step {step} of {total}, state saved; "
                        "the same command goes on from here",
                        interrupt.signal_number,
                    )
                if save_freq > 0 and step % save_freq == 0 and step < total:
                    save()
    finally:
        tracker.close()
    return metrics


def forget(folder: Path) -> None:
    """The stage is finished: drop its snapshots, so that other settings may follow in this folder."""
    Snapshots(folder / "snapshots").clear()


def _resume(recipe: Recipe, console: Console, snapshots: Snapshots, team: Team, what: str, mark: str) -> None:
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
    team.restore(state, "optimizer")
    step = state.meta["optimizer"]["step"]
    snapshots.drop_after(step)  # broken ones, or they would count as the newest
    console.say(f"resume: {what} from step {step}")


def rows_mark(keys: list[bytes]) -> str:
    """One hash for the rows of a run, in order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(hashlib.sha256(key).digest())
    return digest.hexdigest()


def ones(rows: int) -> torch.Tensor:
    """Temperature 1 for every row: supervised losses are of the untempered model."""
    return torch.ones(rows)
