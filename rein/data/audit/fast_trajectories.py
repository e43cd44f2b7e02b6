"""The vectorised checks of trajectories: the same rules as rows_trajectories.py, a batch at a time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rein.config.recipe import Data
from rein.data import schemas as s
from rein.data.audit.batch import (
    Batch,
    Label,
    Unfit,
    ids_keys,
    last_ids,
    plain_text,
    present,
    prompt_side,
    usable_ids,
)
from rein.data.audit.block import LENGTH, NO_TEXT, OTHER, STOP, UNKNOWN, LogProbs, Side
from rein.data.audit.columns import Lists, Texts, sums, texts
from rein.data.audit.hashing import NONE, Keys
from rein.data.filters import LOG_PROB_TOLERANCE, SUM_TOLERANCE
from rein.data.rows_trajectories import (
    COLDEST,
    CUT_OFF,
    CUT_SAMPLING,
    FINISHED,
    GREEDY,
    HOTTEST,
    LOOSE_LOG_PROBS,
    NO_LOG_PROBS,
    NO_TEMPERATURE,
    ODD_FINISH,
)
from rein.types import Ids, Mask

LARGEST = float(np.finfo(np.float32).max)
Rows = NDArray[np.int64]


class Limits(Protocol):
    @property
    def data(self) -> Data: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def scored(self) -> bool: ...


def _no_log_probs(rows: Rows) -> LogProbs | None:
    return None


def _nothing(rows: Rows) -> Counter[str]:
    return Counter()


@dataclass(slots=True)
class Draft:
    """A batch's rows, usable or not; what is worked out for usable ones only is a function of theirs."""

    prompt: Side
    response: Side | None = None
    group: Keys | None = None
    score: NDArray[np.float64] | None = None
    finish: NDArray[np.int8] | None = None
    log_probs: Callable[[Rows], LogProbs | None] = _no_log_probs
    labels: dict[str, Label] = field(default_factory=dict)
    noticed: Callable[[Rows], Counter[str]] = _nothing


def judge(batch: Batch, limits: Limits) -> tuple[Mask, Draft]:
    """Which rows are surely usable, and the batch's rows."""
    data, tokenizer = limits.data, bool(limits.stop_ids)
    prompt, clean = prompt_side(batch, data.max_prompt_length, limits.vocab_size, tokenizer)
    clean &= batch.context()
    ids = batch.lists(s.RESPONSE_IDS, "iu")
    text = texts(batch.column(s.RESPONSE))
    if text is None and not ids.there.all():
        raise Unfit
    clean &= np.where(
        ids.there,
        usable_ids(ids, data.max_response_length, limits.vocab_size),
        plain_text(text) & (not tokenizer) if text is not None else False,
    )
    mask = batch.lists(s.RESPONSE_MASK, "biuf")
    clean &= _usable_mask(mask, ids) & ~_padded(ids, mask, limits.stop_ids)
    stored, known, usable = _log_probs(batch, ids, data)
    score, scored = _scores(batch, ids, scored=limits.scored)
    temperature, warm = batch.numbers(s.TEMPERATURE)
    top_p, cut = batch.numbers(s.TOP_P)
    baseline, based = batch.numbers(s.BASELINE_SCORE)
    clean &= usable & scored & (~based | (np.abs(baseline) <= LARGEST))
    clean &= ~warm | (temperature == 0) | ((temperature >= COLDEST) & (temperature <= HOTTEST))
    clean &= ~cut | ((top_p > 0) & (top_p <= 1))
    labels = {
        name: batch.label(name) for name in (s.BEHAVIOR_POLICY, s.DATA_SOURCE, s.FINISH_REASON, s.GROUP)
    }
    version, versioned = batch.numbers(s.POLICY_VERSION)
    clean &= ~versioned | (np.isfinite(version) & (np.floor(version) == version))
    labels |= {s.TEMPERATURE: _number_label(temperature), s.POLICY_VERSION: _number_label(version)}
    finish = _finish(labels[s.FINISH_REASON])
    known &= ~(warm & (temperature == 0))
    loose = stored.there & ~ids.there if data.behavior != "unknown" else np.zeros(batch.rows, np.bool_)
    notes = {
        NO_TEMPERATURE: ~warm,
        GREEDY: stored.there & ids.there & warm & (temperature == 0),
        LOOSE_LOG_PROBS: loose,
        NO_LOG_PROBS: ~stored.there & (data.behavior is None),
        CUT_SAMPLING: known & cut & (top_p < 1),
        ODD_FINISH: finish == OTHER,
    }
    group = labels.pop(s.GROUP).keys
    return clean, Draft(
        prompt,
        _response_side(ids, text),
        group,
        score if not np.isnan(score).all() else None,
        finish,
        lambda rows: _counted(stored, known, mask, rows),
        labels,
        lambda rows: Counter(
            {what: int(found) for what, where in notes.items() if (found := where[rows].sum())}
        ),
    )


def _response_side(ids: Lists, text: Texts | None) -> Side:
    keys, characters = np.full(len(ids.there), NONE), np.zeros(len(ids.there), np.int64)
    if text is not None and not ids.there.all():
        keys, characters = np.where(ids.there | ~text.there, NONE, text.keys), text.lengths

    def content(row: int) -> Ids | str:
        if ids.there[row]:
            return ids.values[ids.offsets[row] : ids.offsets[row + 1]].astype(np.int64)
        return "" if text is None else str(text.array[row])

    strings, rows = (NO_TEXT, None) if text is None else present(text)
    return Side(
        text_key=keys,
        ids_key=ids_keys(ids),
        length=np.where(ids.there, ids.lengths, characters),
        in_tokens=ids.there,
        last=last_ids(ids),
        content=content,
        texts=strings,
        text_rows=rows,
    )


def _usable_mask(mask: Lists, ids: Lists) -> Mask:
    if not mask.there.any():
        return ~mask.there
    on = sums(mask.values == 1, mask.offsets)
    off = sums(mask.values == 0, mask.offsets)
    fine = mask.whole & ids.there & (mask.lengths == ids.lengths) & (on > 0) & (on + off == mask.lengths)
    return np.asarray(~mask.there | fine)


def _padded(ids: Lists, mask: Lists, stop_ids: frozenset[int]) -> Mask:
    """Rows without a mask and with an end token before the last place: what counts is for the row reader."""
    found = np.zeros(len(ids.there), dtype=np.bool_)
    if not stop_ids or not ids.values.size:
        return found
    ends = np.isin(ids.values, list(stop_ids))
    last = np.isin(last_ids(ids), list(stop_ids))
    return (sums(ends, ids.offsets) > last) & ~mask.there


def _log_probs(batch: Batch, ids: Lists, data: Data) -> tuple[Lists, Mask, Mask]:
    """The column as float32, where behavior is known, and where the column is surely fine."""
    if data.behavior == "unknown":
        from_nothing = Batch(pa.record_batch({"none": pa.nulls(batch.rows)}), [])
        return from_nothing.lists("none", "f"), np.zeros(batch.rows, np.bool_), np.ones(batch.rows, np.bool_)
    found = batch.lists(s.BEHAVIOR_LOG_PROBS, "iuf")
    with np.errstate(over="ignore"):
        values = found.values.astype(np.float32, copy=False)
    stored = Lists(values, found.offsets, found.there, found.whole)
    fine = found.whole & (found.lengths == ids.lengths)
    if values.size and not (np.isfinite(values.min()) and values.max() <= LOG_PROB_TOLERANCE):
        fine &= sums(~(np.isfinite(values) & (values <= LOG_PROB_TOLERANCE)), found.offsets) == 0
    known = stored.there & ids.there
    lax = data.behavior is None
    return stored, known, np.where(known, fine, lax)


def _scores(batch: Batch, ids: Lists, *, scored: bool) -> tuple[NDArray[np.float64], Mask]:
    """The rows' scores, and where they are surely fine."""
    score, there = batch.numbers(s.SCORE)
    fine = ~there | (np.abs(score) <= LARGEST)
    placed = batch.lists(s.TOKEN_LEVEL_SCORES, "iuf")
    if not placed.there.any():
        return score, fine & (there | (not scored))
    with np.errstate(over="ignore", invalid="ignore"):
        values = placed.values.astype(np.float32).astype(np.float64)
        total = sums(values, placed.offsets)
        near = np.abs(total - score) < 0.5 * SUM_TOLERANCE * np.maximum(1.0, np.abs(score))
    whole = placed.whole & ids.there & (placed.lengths == ids.lengths) & np.isfinite(total)
    whole &= ~there | near
    fine &= np.where(placed.there, whole & (np.abs(total) <= LARGEST), there | (not scored))
    return np.where(there | ~placed.there, score, total), fine


def _finish(column: Label) -> NDArray[np.int8]:
    coded = column.texts.array.dictionary_encode()
    codes = [_finish_code(str(name).lower()) for name in coded.dictionary.to_pylist()]
    found: NDArray[np.int8] = np.array([*codes, UNKNOWN], np.int8)[
        coded.indices.to_numpy(zero_copy_only=False)
    ]
    return found


def _finish_code(name: str) -> int:
    return STOP if name in FINISHED else LENGTH if name in CUT_OFF else OTHER if name else UNKNOWN


def _number_label(values: NDArray[np.float64]) -> Label:
    """Numbers as names to count."""
    distinct, which = np.unique(values, return_inverse=True)
    shown = ["" if value != value else f"{value:.10g}" for value in distinct]
    coded = pa.DictionaryArray.from_arrays(pa.array(which.ravel(), pa.int32()), pa.array(shown, pa.string()))
    made = texts(coded)
    assert made is not None
    return Label(made)


def _counted(stored: Lists, known: Mask, mask: Lists, rows: Rows) -> LogProbs | None:
    """The log-probs of the tokens that count."""
    kept = np.zeros(len(known), dtype=np.bool_)
    kept[rows] = True
    kept &= known
    if not kept.any():
        return None
    every = bool(kept.all())
    values = stored.values if every else stored.values[np.repeat(kept, stored.lengths)]
    lengths = stored.lengths[kept]
    if (kept & mask.there).any():
        counted = np.ones(len(values), dtype=np.bool_)
        masked = kept & mask.there
        counted[np.repeat(masked[kept], lengths)] = mask.values[np.repeat(masked, mask.lengths)] != 0
        values = values[counted]
        lengths = sums(counted, np.concatenate(([0], np.cumsum(lengths))))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return LogProbs(values, sums(values, offsets) / lengths)
