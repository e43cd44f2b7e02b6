"""What a training run brings back after a stop: taken from a job, held against it, put back whole.

Part of stages/train.py. snapshots.py writes and verifies it, knowing none of its parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rein.errors import CheckpointError
from rein.manifest import settings_read
from rein.snapshots import RunState
from rein.stages import token_records
from rein.stages.team import KEPT
from rein.stages.train_rows import content
from rein.types import Experience, Trajectory

if TYPE_CHECKING:
    from rein.stages.train_job import Job

EXPERIENCE_TENSORS = [f.name for f in dataclasses.fields(Experience) if f.name not in ("rows", "metrics")]


OF_ROWS = ("train_files", "behavior", "behavior_model")  # what they say is in the rows' own hash


@dataclasses.dataclass(slots=True)
class Cursor:
    """How far the run is: critic-fit updates, batches, updates of this batch, updates done.

    `number` counts updates ever made, undone ones too: it never goes back.
    """

    fitted: int = 0
    batch: int = 0
    update: int = 0
    done: int = 0
    number: int = 0


def run_state(job: Job, experience: Experience | None) -> RunState:
    """The whole run state; mid-batch with the batch's experience, which cannot be made again."""
    tensors, learner = job.team.state()
    kept: dict[str, Tensor] = {}
    if experience is not None and job.cursor.update > 0:
        all_of_it = {name: getattr(experience, name) for name in EXPERIENCE_TENSORS}
        kept = {name: tensor for name, tensor in all_of_it.items() if tensor is not None}
    tensors |= {f"{KEPT}{name}": tensor for name, tensor in kept.items()}
    meta = {
        "learner": learner,
        "cursor": dataclasses.asdict(job.cursor),
        "round": job.round.number,
        "experience": sorted(kept),
        "best": job.best,
        "fit_steps": job.fit_steps,
        "validated": job.validated,
        "settings": job.settings,
        "reins": job.reins.state(),
        "dropped": sorted(job.dropped),
        "applied": job.applied,
        "last": job.last,
        "finished": job.cursor.batch == job.batches,
    }
    return RunState(tensors, meta)


def settings(job: Job) -> dict[str, str]:
    """What a resumed run must share with the one that was saved, as hashes; guards may change."""
    read = {key: value for key, value in settings_read(job.recipe, "train").items() if key != "guards"}
    read["data"] = {key: value for key, value in read["data"].items() if key not in OF_ROWS}
    text = json.dumps([job.start, read], sort_keys=True)
    mixed = job.rows.demonstrations.mark() if job.rows.demonstrations else ""
    rows = content(job.train_rows) + mixed
    return {"settings": hashlib.sha256(text.encode()).hexdigest(), "rows": rows}


def restore(job: Job, state: RunState) -> bool:
    """Go on from a snapshot of the same rows and settings, whole; False where a finished run had others.

    The snapshot that asked for this round's rows goes on with them, at the round's first batch. Raises
    CheckpointError for an unfinished run with other rows or settings: its work is not thrown away.
    """
    meta, folder = state.meta, job.snapshots.folder
    enters = meta["round"] < job.round.number
    if job.round.number - meta["round"] not in (0, 1) or (
        enters and meta["cursor"]["number"] != job.round.asked
    ):
        raise CheckpointError(
            f"{folder}: a snapshot of round {meta['round']}, update {meta['cursor']['number']}, and the run "
            f"is in round {job.round.number}, which goes on from update {job.round.asked}; resume=never "
            "begins anew"
        )
    for what, value in job.settings.items():
        if meta["settings"][what] == value or (enters and what == "rows"):
            continue
        if meta["finished"] and not job.round.number:
            job.console.say(f"resume: the run finished here had other {what}; starting anew")
            return False
        raise CheckpointError(
            f"{folder}: {'a' if meta['finished'] else 'an unfinished'} run with other {what}; use the same "
            "recipe and data, another out=, or start anew with resume=never"
        )
    if enters:
        cursor = meta["cursor"] | {"batch": job.round.begin, "update": 0}
        meta = meta | {"cursor": cursor, "experience": [], "dropped": []}
        own = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(KEPT)}
        state = dataclasses.replace(state, tensors=own, meta=meta)
    job.best, job.validated, job.last = meta["best"], meta["validated"], meta["last"]
    job.reins.resume(meta["reins"], meta["cursor"]["number"])
    go_back(job, state)
    job.saved_at = None if enters else dataclasses.replace(job.cursor)
    job.reins.ground(anew=enters)
    return True


def go_back(job: Job, state: RunState) -> None:
    """Put back what updates move: weights, optimizers, coefficients, cursor, what guards had read.

    All of it or nothing. Raises CheckpointError that names what does not fit.
    """
    meta, cursor = state.meta, Cursor(**state.meta["cursor"])
    kept = _experience(state, job.rows_of(cursor.batch)) if meta["experience"] else None
    job.reins.restore_readings(meta["reins"])
    job.team.restore(state, "learner")
    job.cursor, job.kept_experience, job.saved_at = cursor, kept, None
    job.shorten_fit(meta["fit_steps"])
    job.applied, job.dropped = dict(meta["applied"]), set(meta["dropped"])
    token_records.drop_undone(job)


def _experience(state: RunState, rows: list[Trajectory]) -> Experience:
    """The batch that the snapshot was taken in, without rows that were left out since.

    Raises CheckpointError where it is not whole.
    """
    found: dict[str, Any] = {n.removeprefix(KEPT): t for n, t in state.tensors.items() if n.startswith(KEPT)}
    if fault := _fault(found, state.meta["experience"], len(rows)):
        raise CheckpointError(f"snapshot: {KEPT}{fault}; resume from another snapshot")
    left_out = torch.tensor([not row.response_mask.any() for row in rows])  # by guards, since then
    found["response_mask"] = found["response_mask"] & ~left_out[:, None]
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
