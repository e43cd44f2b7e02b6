"""Arrow columns in, flat numpy views out: numbers in lists, texts, chat turns; None for any other type.

Cells that are null, and nulls within a cell, are marked; whoever reads decides what they mean. Rows of a
batch only, nothing is kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rein.data.audit.hashing import Keys, Offsets, list_keys, pair_keys
from rein.types import Mask

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


@dataclass(frozen=True, slots=True)
class Lists:
    """Numbers, a list a row."""

    values: NDArray[Any]  # of all rows
    offsets: Offsets  # [n + 1]
    there: Mask  # [n] not null
    whole: Mask  # [n] there, without a null inside

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Texts:
    """A text a row; what is null is empty here."""

    array: pa.Array  # large_string without nulls
    data: NDArray[np.uint8]
    offsets: Offsets  # into data, [n + 1]
    there: Mask  # [n]

    @property
    def keys(self) -> Keys:
        return list_keys(self.data, self.offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """In characters."""
        counted: NDArray[np.int64] = pc.utf8_length(self.array).to_numpy(zero_copy_only=False)
        return counted.astype(np.int64)

    @property
    def first_bytes(self) -> NDArray[np.uint8]:
        """0 for an empty text."""
        found = np.zeros(len(self.there), dtype=np.uint8)
        filled = np.diff(self.offsets) > 0
        found[filled] = self.data[self.offsets[:-1][filled]]
        return found


@dataclass(frozen=True, slots=True)
class Turns:
    """Chat messages, a list a row."""

    roles: Texts
    contents: Texts
    offsets: Offsets  # [n + 1]
    there: Mask  # [n]
    whole: Mask  # [n] there, every turn with a role and a content

    @property
    def keys(self) -> Keys:
        return list_keys(pair_keys(self.roles.keys, self.contents.keys), self.offsets)


def lists(array: pa.Array) -> Lists | None:
    """A column of lists of numbers."""
    if pa.types.is_null(array.type):
        nothing = np.zeros(len(array), dtype=np.bool_)
        return Lists(np.zeros(0, np.int64), np.zeros(len(array) + 1, np.int64), nothing, nothing)
    if not any(test(array.type) for test in _LISTS):
        return None
    kind = array.type.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    flat, offsets, there = _flat(array)
    whole = there
    if flat.null_count:
        whole = there & (sums(np.asarray(flat.is_null()).astype(np.int64), offsets) == 0)
        flat = flat.fill_null(False if pa.types.is_boolean(kind) else 0)
    return Lists(flat.to_numpy(zero_copy_only=False), offsets, there, whole)


def texts(array: pa.Array) -> Texts | None:
    """A column of text."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    there = np.asarray(array.is_valid())
    if pa.types.is_null(array.type):
        array = pa.array([""] * len(array), pa.large_string())
    elif not (
        pa.types.is_string(array.type)
        or pa.types.is_large_string(array.type)
        or pa.types.is_string_view(array.type)
    ):
        return None
    array = array.cast(pa.large_string())
    array = array.fill_null("") if array.null_count else array
    _, at, data = array.buffers()
    size = len(array)
    offsets = np.zeros(1, np.int64) if size == 0 else np.frombuffer(at, np.int64)
    offsets = offsets[array.offset : array.offset + size + 1] if size else offsets
    flat = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return Texts(array, flat, offsets, there)


def turns(array: pa.Array) -> Turns | None:
    """A column of chat messages: lists of structs with role and content as text."""
    if not any(test(array.type) for test in _LISTS) or not pa.types.is_struct(array.type.value_type):
        return None
    names = [field.name for field in array.type.value_type]
    if names.count("role") != 1 or names.count("content") != 1:
        return None
    flat, offsets, there = _flat(array)
    parts = dict(zip(names, flat.flatten(), strict=True))
    roles, contents = texts(parts["role"]), texts(parts["content"])
    if roles is None or contents is None:
        return None
    broken = sums(~(roles.there & contents.there).astype(np.bool_), offsets) > 0
    return Turns(roles, contents, offsets, there, there & ~broken)


def numbers(array: pa.Array) -> tuple[NDArray[np.float64], Mask] | None:
    """A column of numbers as floats (null as NaN), and where one is there."""
    there = np.asarray(array.is_valid())
    if pa.types.is_null(array.type):
        return np.full(len(array), np.nan), there
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return None
    found = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found.astype(np.float64, copy=False), there


def sums(values: NDArray[Any], offsets: Offsets) -> NDArray[Any]:
    """The sum of each row; 0 of an empty one."""
    kind = np.int64 if values.dtype.kind in "bi" else values.dtype
    found = np.zeros(len(offsets) - 1, dtype=kind)
    filled = np.flatnonzero(np.diff(offsets))
    if filled.size:
        found[filled] = np.add.reduceat(values, offsets[:-1][filled], dtype=kind)
    return found


def parents(offsets: Offsets) -> NDArray[np.int64]:
    """The row of each value."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _flat(array: pa.Array) -> tuple[pa.Array, Offsets, Mask]:
    """The values of all rows, where each row's begin, and which rows are there."""
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    there = np.asarray(array.is_valid())
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return array.flatten(), np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), there
