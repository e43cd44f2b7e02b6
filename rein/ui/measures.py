"""One number for each row of a Parquet batch: its score, its length, what its tokens have in the mean.

A measure is there where the file's columns have the types it needs. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Measure:
    """`of` gives float64 values, NaN where a row has none, from a batch with `columns`."""

    label: str
    columns: tuple[str, ...]
    of: Callable[[pa.RecordBatch], Array]


NUMBERS = {"score": "score", "before_score": "score before", "after_score": "score after"}
MEANS = {  # column of one number a token -> measure, label
    "weights": ("weight", "weight"),
    "advantages": ("advantage", "advantage"),
    "kl": ("kl", "KL"),
    "values": ("value", "value"),
    "behavior_log_probs": ("behavior", "behavior log-prob"),
}
LENGTHS = (  # cheapest first: (column that has one entry a token, ...) -> label
    ("behavior_log_probs", "tokens"),
    ("response_mask", "tokens"),
    ("response_ids", "tokens"),
    ("after_ids", "tokens"),
    ("response", "characters"),
    ("after", "characters"),
)


def of(schema: pa.Schema) -> dict[str, Measure]:
    """The measures that a file with these columns has."""
    kinds = {field.name: field.type for field in schema}
    found = {
        name: Measure(label, (name,), _number_of(name))
        for name, label in NUMBERS.items()
        if name in kinds and _is_number(kinds[name])
    }
    if {"before_score", "after_score"} <= found.keys():
        found["moved"] = Measure("change of score", ("before_score", "after_score"), _moved)
    for column, label in LENGTHS:
        if column in kinds and (is_text(kinds[column]) if label == "characters" else is_list(kinds[column])):
            found["length"] = Measure(label, (column,), _length_of(column))
            break
    mask = ("response_mask",) if _is_numbers(kinds.get("response_mask")) else ()
    for column, (name, label) in MEANS.items():
        if column in kinds and _is_numbers(kinds[column]):
            found[name] = Measure(f"mean {label}", (column, *mask), _mean_of(column, None, mask))
    both = ("old_log_probs", "reference_log_probs")
    if all(_is_numbers(kinds.get(name)) for name in both):
        found["log_ratio"] = Measure("mean log-ratio", (*both, *mask), _mean_of(*both, mask))
    return found


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_numbers(kind: pa.DataType | None) -> bool:
    return kind is not None and is_list(kind) and _is_number(kind.value_type)


def floats(values: pa.Array) -> Array:
    """Numbers or truth values as float64, null as NaN; by the buffers: to_numpy imports all of pandas."""
    if pa.types.is_boolean(values.type):
        values = pc.cast(values, pa.int8())
    values = pc.cast(values, pa.float64(), safe=False)
    if not len(values):
        return np.zeros(0)
    here, (valid, data) = slice(values.offset, values.offset + len(values)), values.buffers()
    found = np.frombuffer(data, np.float64)[here]
    if not values.null_count:
        return found
    return np.where(np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")[here], found, np.nan)


def _lengths(column: pa.Array) -> Array:
    return np.nan_to_num(floats(pc.list_value_length(column))).astype(np.int64)


def _number_of(name: str) -> Callable[[pa.RecordBatch], Array]:
    return lambda batch: floats(batch.column(name))


def _moved(batch: pa.RecordBatch) -> Array:
    return floats(batch.column("after_score")) - floats(batch.column("before_score"))


def _length_of(name: str) -> Callable[[pa.RecordBatch], Array]:
    def length(batch: pa.RecordBatch) -> Array:
        column = batch.column(name)
        return floats(pc.utf8_length(column) if is_text(column.type) else pc.list_value_length(column))

    return length


def _mean_of(name: str, minus: str | None, mask: Sequence[str]) -> Callable[[pa.RecordBatch], Array]:
    """The mean over tokens that count and have a number."""

    def mean(batch: pa.RecordBatch) -> Array:
        column = batch.column(name)
        lengths, values = _lengths(column), floats(pc.list_flatten(column))
        if minus is not None:
            other = batch.column(minus)
            if not np.array_equal(lengths, _lengths(other)):
                return np.full(len(lengths), np.nan)
            values = values - floats(pc.list_flatten(other))
        counts = np.isfinite(values)
        if mask and np.array_equal(lengths, _lengths(batch.column(mask[0]))):
            counts &= floats(pc.list_flatten(batch.column(mask[0]))) > 0
        ends = np.concatenate([[0], np.cumsum(lengths)])
        sums = np.concatenate([[0.0], np.cumsum(np.where(counts, values, 0.0))])
        number = np.concatenate([[0], np.cumsum(counts)])
        held = number[ends[1:]] - number[ends[:-1]]
        total = sums[ends[1:]] - sums[ends[:-1]]
        return np.where(held > 0, total / np.maximum(held, 1), np.nan)

    return mean
