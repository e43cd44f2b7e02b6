"""An Arrow batch in; out come the rows that are surely usable, as a Block, without looking at one by itself.

Whatever looks bad or odd here is left to the loader's own reader (slow.py), which has the last word: so the
checks below may be stricter than the loader's, and never laxer. Knows prompts and trajectories.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rein.config.recipe import Data
from rein.data import schemas as s
from rein.data.audit import fast_trajectories as trajectories
from rein.data.audit.batch import Batch, Unfit, prompt_side
from rein.data.audit.block import Block, pick
from rein.types import Mask


@dataclass(frozen=True, slots=True)
class Limits:
    """What decides whether a row is usable."""

    data: Data
    vocab_size: int
    stop_ids: frozenset[int]  # empty: no tokenizer, so text can be judged as it is
    scored: bool


def fast_block(
    batch: pa.RecordBatch, as_json: list[str], kind: s.Kind, limits: Limits, source: str, first: int
) -> tuple[Mask, Block | None]:
    """Which rows are surely usable, and these rows; none where the types of the columns are unusual."""
    nothing = np.zeros(batch.num_rows, dtype=np.bool_)
    if kind not in ("prompts", "trajectories") or not batch.num_rows:
        return nothing, None
    try:
        seen = Batch(batch, as_json)
        clean, block = _prompts(seen, limits) if kind == "prompts" else trajectories.judge(seen, limits)
    except Unfit:
        return nothing, None
    rows = np.flatnonzero(clean)
    return clean, _placed(block, rows, source, first)


def _prompts(batch: Batch, limits: Limits) -> tuple[Mask, trajectories.Draft]:
    side, clean = prompt_side(batch, limits.data.max_prompt_length, limits.vocab_size, bool(limits.stop_ids))
    clean &= batch.context()
    return clean, trajectories.Draft(prompt=side, labels={s.DATA_SOURCE: batch.label(s.DATA_SOURCE)})


def _placed(draft: trajectories.Draft, rows: NDArray[np.int64], source: str, first: int) -> Block:
    every = len(rows) == len(draft.prompt.length)
    return Block(
        where=lambda i: f"{source} row {first + int(rows[i])}",
        prompt=draft.prompt if every else pick(draft.prompt, rows),
        response=draft.response if every or draft.response is None else pick(draft.response, rows),
        group=draft.group[rows] if draft.group is not None else np.zeros(len(rows), np.uint64),
        score=None if draft.score is None else draft.score[rows],
        finish=None if draft.finish is None else draft.finish[rows],
        log_probs=draft.log_probs(rows),
        names={name: found for name, column in draft.labels.items() if (found := column.counts(rows))},
        noticed=draft.noticed(rows),
    )
