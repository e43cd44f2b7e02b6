"""What a training run brings back after a stop: taken from a job, held against it, put back whole.

Part of stages/train.py. snapshots.py writes and verifies it, knowing none of its parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rein.errors import CheckpointError
from rein.manifest import settings_read
from rein.snapshots import RunState
from rein.stages.train_rows import content
from rein.types import Experience, Trajectory

if TYPE_CHECKING:
    from rein.stages.train_job import Job

EXPERIENCE_TENSORS = [f.name for f in dataclasses.fields(Experience) if f.name not in ("rows", "metrics")]
KEPT = "experience/"  # begins the names of their tensors


@dataclasses.dataclass(slots=True)
class Cursor:
    """How far the run is: critic-fit updates, batches, updates of this batch, updates in all."""

    fitted: int = 0
    batch: int = 0
    update: int = 0
    number: int = 0


def run_state(job: Job, experience: Experience | None) -> RunState:
    """The whole run state; mid-batch with the batch's experience, which cannot be made again."""
    tensors, learner = job.learner.state()
    kept: dict[str, Tensor] = {}
    if experience is not None and job.cursor.update > 0:
        all_of_it = {name: getattr(experience, name) for name in EXPERIENCE_TENSORS}
        kept = {name: tensor for name, tensor in all_of_it.items() if tensor is not None}
    tensors |= {f"{KEPT}{name}": tensor for name, tensor in kept.items()}
    meta = {
        "learner": learner,
        "cursor": dataclasses.asdict(job.cursor),
        "experience": sorted(kept),
        "best": job.best,
        "fit_steps": job.fit_steps,
        "skipped": job.skipped,
        "validated": job.validated,
        "settings": job.settings,
        "skips": job.not_finite.skips,
        "applied": job.applied,
        "last": job.last,
        "finished": job.cursor.batch == job.batches,
    }
    return RunState(tensors, meta)


def settings(job: Job) -> dict[str, str]:
    """What a resumed run must share with the one that was saved, as hashes."""
    text = json.dumps([job.start, settings_read(job.recipe, "train")], sort_keys=True)
    mixed = job.rows.demonstrations.mark() if job.rows.demonstrations else ""
    rows = content(job.train_rows) + mixed
    return {"settings": hashlib.sha256(text.encode()).hexdigest(), "rows": rows}


def restore(job: Job, state: RunState) -> bool:
    """Go on from a snapshot of the same rows and settings, whole; False where a finished run had others.

    Raises CheckpointError for an unfinished run with other rows or settings: its work is not thrown away.
    """
    meta = state.meta
    for what, value in job.settings.items():
        if meta["settings"][what] != value:
            if meta["finished"]:
                job.console.say(f"resume: the run finished here had other {what}; starting anew")
                return False
            raise CheckpointError(
                f"{job.snapshots.folder}: an unfinished run with other {what}; use the same recipe and "
                "data, another out=, or start anew with resume=never"
            )
    cursor = Cursor(**meta["cursor"])
    kept = _experience(state, job.rows_of(cursor.batch)) if meta["experience"] else None
    rest = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(KEPT)}
    job.learner.restore(rest, meta["learner"])
    job.cursor, job.kept_experience = cursor, kept
    job.best, job.skipped, job.validated = meta["best"], meta["skipped"], meta["validated"]
    job.shorten_fit(meta["fit_steps"])
    job.not_finite.skips, job.last, job.applied = meta["skips"], meta["last"], meta["applied"]
    job.saved_at = dataclasses.replace(job.cursor)
    return True


def _experience(state: RunState, rows: list[Trajectory]) -> Experience:
    """The batch that the snapshot was taken in, as it was. Raises CheckpointError where it is not whole."""
    found: dict[str, Any] = {n.removeprefix(KEPT): t for n, t in state.tensors.items() if n.startswith(KEPT)}
    if fault := _fault(found, state.meta["experience"], len(rows)):
        raise CheckpointError(f"snapshot: {KEPT}{fault}; resume from another snapshot")
    return Experience(rows=rows, **found)


def _fault(found: dict[str, Tensor], wanted: list[str], rows: int) -> str:
    """The first part of a stored batch that is missing or odd."""
    if odd := sorted(set(found) ^ set(wanted)):
        return f"{odd[0]} {'belongs to no batch' if odd[0] in found else 'is missing'}"
    for name, tensor in found.items():
        shape = [rows] if name == "temperature" else [rows, found["response_mask"].shape[-1]]
        if list(tensor.shape) != shape:
            return f"{name} is {list(tensor.shape)}, not {shape}"
    return ""
