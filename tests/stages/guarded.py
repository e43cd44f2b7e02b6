"""Runs of a few rows whose rules fire at readings that are known beforehand, and what is left of them.

Seven rows train: a batch of four and one of three, in mini-batches of two, two epochs of each role. So a
batch is four updates of the critic, then four of the actor; a run of two epochs is 32 updates.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rows_made import random_trajectories
from safetensors.torch import load_file
from torch import Tensor
from training_made import recipe

from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import Interrupted
from rein.journal import read
from rein.runtime.interrupt import Interrupt
from rein.stages import train
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics, untimed
from rein.types import Trajectory

BATCH = 8  # updates
LR = 1e-2
HALVE_AT_3 = {"metric": "actor/lr", "above": 0.6 * LR, "for": 3}  # the third actor update at the full rate


def guarded(
    path: str,
    folder: Path,
    out: str = "run",
    *,
    rules: Sequence[Any] = (),
    rows: list[Trajectory] | None = None,
    **sections: Any,
) -> Recipe:
    """No preset and these rules; a section's keys go over what is said above."""
    made = random_trajectories(14) if rows is None else rows
    file = folder / f"{out}.parquet"
    write_rows(file, [trajectory_row(row) for row in made], TRAJECTORIES, {})
    base: dict[str, dict[str, Any]] = {
        "data": {"train_files": [str(file)], "train_batch_size": 4, "holdout_fraction": 1.0},
        "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        "model": {"path": path},
        "trainer": {"critic_warmup": 0, "val_prompts": 1, "val_before_train": False, "total_epochs": 2},
        "evaluate": {"reward": [{"name": "length"}]},
        "guards": {"preset": "off", "rules": list(rules), "snapshot_every": -1},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    some = recipe(4, **merged)
    return some.model_copy(update={"out": str(folder / out), "cache": str(folder / "cache")})


def ran(some: Recipe) -> dict[str, Any]:
    return train.run(some, Console(quiet=True))


def events(some: Recipe, kind: str | None = None) -> list[dict[str, Any]]:
    """The journal's lines, of one kind where it is given."""
    lines = read(Path(some.out) / "train" / "journal.jsonl")
    return [line for line in lines if kind in (None, line["kind"])]


def logged(some: Recipe, *names: str) -> list[dict[str, Any]]:
    """The lines of the metrics that have all these names, without the times."""
    lines = untimed(read_metrics(Path(some.out) / "train" / "metrics.jsonl"))
    return [line for line in lines if set(names) <= line.keys()]


def values(some: Recipe, name: str) -> list[float]:
    return [line[name] for line in logged(some, name)]


def weights(some: Recipe, which: str = "last") -> dict[str, Tensor]:
    return load_file(Path(some.out) / "train" / which / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_end(one: Recipe, other: Recipe) -> bool:
    """Both models came out bit for bit."""
    return all(same(weights(one, which), weights(other, which)) for which in ("last", "critic"))


class Course:
    """A run watched from its progress bar: the learner's state after each update, by number, and after each
    rollback; it may be broken off there.
    """

    def __init__(
        self,
        some: Recipe,
        *,
        stop_at: int | None = None,
        stop_at_rollback: int = 0,
        also: Callable[[Job], None] = lambda job: None,  # done after each update
    ) -> None:
        self.recipe, self.stop_at, self.stop_at_rollback, self.also = some, stop_at, stop_at_rollback, also
        self.interrupt = Interrupt()
        self.after: dict[int, dict[str, Any]] = {}
        self.rollbacks: list[dict[str, Any]] = []
        self.job: Job = open_job(some, Console(quiet=True))

    def __call__(self, steps: int = 1, note: str = "", total: int | None = None) -> None:
        seen = state_of(self.job)
        if steps > 0:
            self.after.setdefault(self.job.cursor.number, seen)
        elif self.job.reins.rollbacks > len(self.rollbacks):
            self.rollbacks.append(seen)
            if len(self.rollbacks) == self.stop_at_rollback:
                self.interrupt.signal_number = 2
        if self.job.cursor.number == self.stop_at:
            self.interrupt.signal_number = 2
        self.also(self.job)

    def run(self) -> "Course":
        """To the end, or to where it is broken off or left."""
        self.after[self.job.cursor.number] = state_of(self.job)
        try:
            train.fit_critic(self.job, self.interrupt, self)
            train.train(self.job, self.interrupt, self)
            self.facts: dict[str, Any] | None = self.job.finish()
        except Interrupted:
            self.facts = None
        finally:
            self.job.close()
        return self


def state_of(job: Job) -> dict[str, Any]:
    """What a rollback puts back, copied; the number and the reins beside it."""
    tensors, meta = job.learner.state()
    return {
        "tensors": {name: tensor.clone() for name, tensor in tensors.items()},
        "meta": json.loads(json.dumps(meta)),
        "cursor": (job.cursor.fitted, job.cursor.batch, job.cursor.update, job.cursor.done),
        "number": job.cursor.number,
        "readings": json.loads(json.dumps([guard.state() for guard in job.reins.guards])),
        "dropped": set(job.dropped),
        "applied": dict(job.applied),
        "total": (job.total_updates, job.fit_steps),
        "soft": job.reins.soft,
        "excluded": set(job.reins.excluded),
        "experience": job.kept_experience,
        "generator": torch.get_rng_state(),
    }


def put_back(found: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """What of a state after a rollback is not the target's, by name."""
    odd = [
        key
        for key in ("meta", "cursor", "readings", "dropped", "applied", "total")
        if found[key] != target[key]
    ]
    if not torch.equal(found["generator"], target["generator"]):
        odd.append("generator")
    return odd if same(found["tensors"], target["tensors"]) else [*odd, "tensors"]


def batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """A state after the last update of a batch as it is saved: at the next one's begin."""
    fitted, batch, _, done = state["cursor"]
    return state | {"cursor": (fitted, batch + 1, 0, done), "dropped": set()}
