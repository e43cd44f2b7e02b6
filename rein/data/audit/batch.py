"""An Arrow batch as the vectorised checks read it: columns by name, and the prompt side that all kinds share.

Raises Unfit where a column's type is one that only the row reader can judge.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rein.data import schemas as s
from rein.data.audit.block import Side
from rein.data.audit.columns import Lists, Texts, lists, numbers, parents, sums, texts, turns
from rein.data.audit.hashing import NONE, Keys, list_keys, pair_keys
from rein.types import Ids, Mask

# First bytes of a text that may be JSON text of messages: "[", or white space before it.
_ODD_START = np.zeros(256, dtype=np.bool_)
_ODD_START[[*range(0x21), ord("["), 0x7F, 0xC2, 0xE1, 0xE2, 0xE3]] = True
_SIMPLE = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_string),
    *(pa.types.is_large_string, pa.types.is_string_view),
)


class Unfit(Exception):
    """This batch is for the row reader."""


@dataclass(frozen=True, slots=True)
class Label:
    """A column of short names or whole numbers; null is empty."""

    texts: Texts

    @property
    def keys(self) -> Keys:
        """NONE where it is empty."""
        found = self.texts.keys
        found[np.diff(self.texts.offsets) == 0] = NONE
        return found

    def counts(self, rows: NDArray[np.int64]) -> Counter[str]:
        """How often each name that is not empty occurs in these rows."""
        array = self.texts.array
        kept = array if len(rows) == len(array) else array.take(pa.array(rows))
        return Counter(
            {str(v["values"]): int(v["counts"]) for v in kept.value_counts().to_pylist() if v["values"]}
        )


class Batch:
    """Columns by name; all of them are valid Arrow with types that every row reads as plain Python values."""

    def __init__(self, batch: pa.RecordBatch, as_json: list[str]) -> None:
        if not all(_plain(field.type) for field in batch.schema):
            raise Unfit
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise Unfit from error
        self.rows = batch.num_rows
        self._batch, self._as_json = batch, set(as_json)

    def column(self, name: str) -> pa.Array:
        """The column; all null where the file has none."""
        if name not in self._batch.schema.names:
            return pa.nulls(self.rows)
        found = self._batch.column(name)
        if name in self._as_json and found.null_count < self.rows:
            raise Unfit
        return found

    def lists(self, name: str, kinds: str) -> Lists:
        """Lists of numbers of these numpy kinds; raises Unfit."""
        found = lists(self.column(name))
        if found is None or (found.there.any() and found.values.dtype.kind not in kinds):
            raise Unfit
        return found

    def numbers(self, name: str) -> tuple[NDArray[np.float64], Mask]:
        found = numbers(self.column(name))
        if found is None:
            raise Unfit
        return found

    def label(self, name: str) -> Label:
        column = self.column(name)
        if pa.types.is_floating(column.type) and (column.is_null(nan_is_null=True)).true_count == self.rows:
            column = pa.nulls(self.rows)
        if pa.types.is_integer(column.type):
            column = column.cast(pa.large_string())
        found = texts(column)
        if found is None:
            raise Unfit
        return Label(found)

    def context(self) -> Mask:
        """Where the columns that travel with a prompt are what they should be."""
        fine = np.ones(self.rows, dtype=np.bool_)
        for name in (s.REWARD_MODEL, s.EXTRA_INFO, s.TOOLS):
            column = self.column(name)
            if name == s.TOOLS or not pa.types.is_struct(column.type):
                fine &= ~np.asarray(column.is_valid())
        self.label(s.DATA_SOURCE)
        return fine


def prompt_side(batch: Batch, longest: int, vocab_size: int, tokenizer: bool) -> tuple[Side, Mask]:
    """The prompts, and which of them are surely usable."""
    ids = batch.lists(s.PROMPT_IDS, "iu")
    there, fine, text_key, characters, strings, string_rows = _prompt_texts(batch)
    usable = usable_ids(ids, longest, vocab_size)
    clean = np.where(ids.there, usable & (fine | ~there), there & fine & (not tokenizer))
    values = ids.values

    def content(row: int) -> Ids | str:
        if not there[row]:
            return values[ids.offsets[row] : ids.offsets[row + 1]].astype(np.int64)
        if string_rows is None:
            return str(strings[row])
        return "\n".join(strings.take(pa.array(np.flatnonzero(string_rows == row))).to_pylist())

    side = Side(
        text_key=text_key,
        ids_key=ids_keys(ids),
        length=np.where(ids.there, ids.lengths, characters),
        in_tokens=ids.there,
        last=last_ids(ids),
        content=content,
        texts=strings,
        text_rows=string_rows,
    )
    return side, clean


def usable_ids(ids: Lists, longest: int, vocab_size: int) -> Mask:
    """Rows with 1 to `longest` ids, all of the vocabulary."""
    fine = ids.whole & (ids.lengths > 0) & (ids.lengths <= longest)
    if ids.values.size and (ids.values.min() < 0 or ids.values.max() >= vocab_size):
        fine &= sums((ids.values < 0) | (ids.values >= vocab_size), ids.offsets) == 0
    return fine


def ids_keys(ids: Lists) -> Keys:
    return np.where(ids.there, list_keys(ids.values, ids.offsets), NONE)


def last_ids(ids: Lists) -> NDArray[np.int64]:
    found = np.full(len(ids.there), -1, dtype=np.int64)
    filled = ids.lengths > 0
    found[filled] = ids.values[ids.offsets[1:][filled] - 1]
    return found


def plain_text(found: Texts) -> Mask:
    """Texts that are there, not empty, and no JSON text of messages."""
    return found.there & ~_ODD_START[found.first_bytes]


def present(found: Texts) -> tuple[pa.Array, NDArray[np.int64] | None]:
    """The texts that are there, and their rows; None: one a row."""
    if found.there.all():
        return found.array, None
    rows = np.flatnonzero(found.there)
    return found.array.take(pa.array(rows)), rows


def _prompt_texts(
    batch: Batch,
) -> tuple[Mask, Mask, Keys, NDArray[np.int64], pa.Array, NDArray[np.int64] | None]:
    """Where prompts are there, where they are fine, their keys, lengths, texts, and the rows of the texts."""
    column = batch.column(s.PROMPT)
    plain = texts(column)
    if plain is not None:
        key = np.where(plain.there, one_user_turn(plain.keys), NONE)
        strings, rows = present(plain)
        return plain.there, plain_text(plain), key, plain.lengths, strings, rows
    found = turns(column)
    if found is None:
        raise Unfit
    last = found.offsets[1:] - 1
    fine = found.whole & (np.diff(found.offsets) > 0)
    if not fine.any():
        raise Unfit
    safe = np.where(fine, last, last[np.flatnonzero(fine)[0]])
    answers = np.asarray(pc.equal(found.roles.array, "assistant"))
    fine &= ~answers[safe] & (np.diff(found.contents.offsets)[safe] > 0)
    key = np.where(found.there, found.keys, NONE)
    characters = sums(found.contents.lengths, found.offsets)
    return found.there, fine, key, characters, found.contents.array, parents(found.offsets)


def one_user_turn(keys: Keys) -> Keys:
    """The keys of prompts that are one user turn with these contents."""
    turn = pair_keys(np.full(len(keys), _USER), keys)
    return list_keys(turn, np.arange(len(keys) + 1))


_USER = list_keys(np.frombuffer(b"user", np.uint8), np.array([0, 4], np.int64))[0]


def _plain(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if any(test(kind) for test in _SIMPLE):
        return True
    nested = pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    nested = nested or pa.types.is_fixed_size_list(kind)
    return nested and all(_plain(kind.field(i).type) for i in range(kind.num_fields))
