"""What single trajectories went through: of each batch the rows whose actor is furthest from the reference.

Written as `train/tokens/<batch>.parquet` when a batch's experience is made, by the rank that leads, which
knows the rows of all ranks. `batch` counts from 0, as cursor.batch does; the file's metadata say which update
comes next (`number`) and which estimator `kl` is. The actor is the one at the start of the batch's updates.
Reads what is there already: no pass, no random number. Part of stages/train.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from torch import Tensor

from rein.data.parquet import write_rows
from rein.data.pieces import pieces, whole_text
from rein.errors import CheckpointError, DataError
from rein.functional.kl import k3_soft
from rein.types import Experience, Trajectory

if TYPE_CHECKING:
    from rein.stages.train_job import Job

FOLDER: Final = "tokens"
MOST_FILES: Final = 64  # the first batch, the last, and others evenly between
KL_KIND: Final = "k3_soft"
_FLOATS = pa.list_(pa.float32())
SCHEMA: Final = pa.schema(
    [
        ("row", pa.string()),  # Trajectory.where: the file and row that it was read from
        ("batch", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("tokens", pa.list_(pa.string())),  # a piece of text for each id
        ("response_ids", pa.list_(pa.int64())),
        ("response_mask", pa.list_(pa.bool_())),
        ("score", pa.float64()),
        ("old_log_probs", _FLOATS),
        ("reference_log_probs", _FLOATS),  # null where the recipe needs no reference
        ("behavior_log_probs", _FLOATS),  # null where unknown
        ("advantages", _FLOATS),
        ("values", _FLOATS),  # null without a critic
        ("weights", _FLOATS),  # old / behavior, bounded; null where none
        (
            "kl",
            _FLOATS,
        ),  # k3_soft of old and reference, z = ref - old: e^z - z - 1 up to 2.6, then its tangent
    ]
)


def record(job: Job, experience: Experience) -> None:
    """Write a batch's file, and take away the one before where it is not among those that stay.

    Nothing of the training waits for it: where it cannot be written, that is said.
    """
    most, batch = job.recipe.trainer.keep_trajectories, job.cursor.batch
    if not most:
        return
    try:
        rows = _rows(job, experience, furthest(experience, most), batch)
        noted = {"number": str(job.cursor.number), "kl": KL_KIND}
        write_rows(_file(job, batch), rows, SCHEMA, noted)
        stay = staying(job.batches)
        for other in _files(job.folder):
            if int(other.stem) != batch and int(other.stem) not in stay:
                other.unlink(missing_ok=True)
    except (CheckpointError, DataError, OSError) as error:
        job.console.say(f"warning: token records: {error}")


def drop_undone(job: Job) -> None:
    """Take away the files of batches that are to be made again, or were another run's."""
    begun = job.cursor.batch + (job.kept_experience is not None)
    for file in _files(job.folder):
        if int(file.stem) >= begun:
            file.unlink(missing_ok=True)


def furthest(experience: Experience, most: int) -> list[int]:
    """Rows by mean |log actor / reference| of the tokens that count, the furthest first.

    From three on the rows whose sum is the highest and the lowest are among them. Without a reference the
    behavior policy is in its place; without that the rows are those of the largest mean |advantage|.
    """
    mask = experience.response_mask
    gap = _gap(experience).where(mask, 0)
    counted = mask.sum(1)
    order = (gap.abs().sum(1) / counted.clamp(min=1)).argsort(descending=True, stable=True).tolist()
    order = [i for i in order if counted[i]]
    if not order:
        return []
    sums = gap.sum(1).tolist()
    ends = [max(order, key=lambda i: sums[i]), min(order, key=lambda i: sums[i])]
    kept = list(dict.fromkeys([*order[: max(most - 2, 1)], *ends, *order]))[:most]
    return sorted(kept, key=order.index)


def staying(batches: int) -> set[int]:
    """The batches whose files stay to the end of a run of so many."""
    if batches <= MOST_FILES:
        return set(range(batches))
    return {i * (batches - 1) // (MOST_FILES - 1) for i in range(MOST_FILES)}


def _gap(experience: Experience) -> Tensor:
    for other in (experience.ref_log_probs, experience.behavior_log_probs):
        if other is not None:
            return experience.old_log_probs - other
    return experience.advantages


def _rows(job: Job, experience: Experience, chosen: list[int], batch: int) -> Iterator[dict[str, Any]]:
    old, reference = experience.old_log_probs, experience.ref_log_probs
    kl = None if reference is None else k3_soft(old, reference)
    rows = [experience.rows[i] for i in chosen]
    texts = pieces(job.actor.tokenizer, chain.from_iterable(row.response_ids.tolist() for row in rows))
    for i, row in zip(chosen, rows, strict=True):
        ids = row.response_ids.tolist()
        yield {
            "row": whole_text(row.where),
            "batch": batch,
            "prompt": whole_text(row.text),
            "response": whole_text(row.response),
            "tokens": [texts[one] for one in ids],
            "response_ids": ids,
            "response_mask": experience.response_mask[i, : len(ids)].tolist(),
            "score": row.score,
            "old_log_probs": _cut(old, i, row),
            "reference_log_probs": _cut(reference, i, row),
            "behavior_log_probs": _cut(experience.behavior_log_probs, i, row),
            "advantages": _cut(experience.advantages, i, row),
            "values": _cut(experience.values, i, row),
            "weights": _cut(experience.rollout_is_weights, i, row),
            "kl": _cut(kl, i, row),
        }


def _cut(tensor: Tensor | None, i: int, row: Trajectory) -> list[float] | None:
    return None if tensor is None else tensor[i, : len(row.response_ids)].tolist()


def _file(job: Job, batch: int) -> Path:
    return job.folder / FOLDER / f"{batch:06d}.parquet"


def _files(folder: Path) -> list[Path]:
    """In order; what is no record's name is another's."""
    return sorted(file for file in (folder / FOLDER).glob("*.parquet") if file.stem.isdecimal())
