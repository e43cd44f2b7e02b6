"""Files in; every row comes out once, in a Block where it is usable and as a Reject where it is not.

Batches are decoded while the one before is looked at. Rows that the vectorised pass is not sure of go
through the loader's own reader, so that a row's verdict is the loader's.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from rein.data import schemas as s
from rein.data.audit.block import Block
from rein.data.audit.fast import Limits, fast_block
from rein.data.audit.slow import Used, slow_block
from rein.data.audit.stand_in import END
from rein.data.cells import decoded
from rein.data.files import Source, is_parquet
from rein.data.loader import (
    demonstrations_reader,
    pairs_reader,
    prompts_reader,
    trajectories_reader,
)
from rein.data.parquet import Row, batch_rows, columns_of, read_batches, source_rows
from rein.data.rejects import BadRow, Reject
from rein.data.rows_prompts import Reading

BATCH_BYTES = 32 << 20
ROWS = 1024  # that the row reader is given at a time
Found = tuple[Block | None, list[Reject]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Way:
    """How files are read: as what kind, by which rules."""

    kind: s.Kind
    reading: Reading
    scored: bool = False
    prompt_key: str = s.PROMPT
    response_key: str = s.RESPONSE

    @property
    def tokenizer(self) -> bool:
        return END not in self.reading.encoder.stop_ids

    @property
    def limits(self) -> Limits:
        encoder = self.reading.encoder
        stops = encoder.stop_ids if self.tokenizer else frozenset[int]()
        return Limits(self.reading.data, encoder.vocab_size, stops, self.scored)

    def chosen(self, source: Source) -> tuple[set[str], Callable[[str, Row], Sequence[Any]], tuple[str, ...]]:
        """The columns that are read of a file, and the loader's reader of its rows."""
        if self.kind == "prompts":
            return prompts_reader(self.reading)(source, columns_of(source))
        if self.kind == "trajectories":
            reader = trajectories_reader(self.reading, scored=self.scored, ranked=False)
            return reader(source, columns_of(source))
        if self.kind == "preferences":
            return pairs_reader(self.reading)(source, columns_of(source))
        reader_of = demonstrations_reader(self.reading, self.prompt_key, self.response_key)
        return reader_of(source, columns_of(source))


def read(source: Source, way: Way) -> Iterator[Found]:
    """One file's rows, in pieces; each piece's rows are in order."""
    wanted, reader, _ = way.chosen(source)
    if is_parquet(source):
        yield from _parquet(source, wanted, reader, way)
        return
    broken: list[Reject] = []
    rows = source_rows(source, wanted, lambda where, why: broken.append(Reject(where, why, "unreadable")))
    while chunk := list(islice(rows, ROWS)):
        yield _judged(chunk, reader, way, broken)
        broken.clear()
    yield None, list(broken)


def _parquet(source: Source, wanted: set[str], reader: Callable[..., Any], way: Way) -> Iterator[Found]:
    for first, batch, as_json in _ahead(read_batches(source, wanted, BATCH_BYTES)):
        clean, block = fast_block(batch, as_json, way.kind, way.limits, source.name, first)
        if block is not None:
            yield block, []
        odd = np.flatnonzero(~clean)
        for start in range(0, len(odd), ROWS):
            places = odd[start : start + ROWS]
            broken: list[Reject] = []

            def bad(where: str, why: str, into: list[Reject] = broken) -> None:
                into.append(Reject(where, why, "unreadable"))

            part = _part(batch, places)
            numbers = [first + int(place) for place in places]
            rows = list(batch_rows(source, numbers, part, as_json, bad))
            yield _judged(rows, reader, way, broken)


def _part(batch: pa.RecordBatch, places: Any) -> pa.RecordBatch:
    if len(places) == places[-1] - places[0] + 1:
        return batch.slice(int(places[0]), len(places))
    try:
        return batch.take(pa.array(places))
    except pa.ArrowException:  # a type that cannot be taken apart
        slices = [batch.slice(int(place), 1) for place in places]
        return pa.Table.from_batches(slices).combine_chunks().to_batches()[0]


def _judged(
    rows: Sequence[tuple[str, Row]], reader: Callable[..., Any], way: Way, broken: list[Reject]
) -> Found:
    used, rejects = [], list(broken)
    for where, row in rows:
        try:
            items = reader(where, {name: decoded(value) for name, value in row.items()})
        except BadRow as wrong:
            rejects.append(Reject(where, wrong.reason, wrong.kind))
            continue
        for item in items:
            if isinstance(item, Reject):
                rejects.append(item)
            else:
                used.append(Used(where, row, item))
    keys = (way.prompt_key, way.response_key)
    block = (
        slow_block(used, tokenizer=way.tokenizer, prompt_key=keys[0], response_key=keys[1]) if used else None
    )
    return block, rejects


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The items, the next one made in a thread while this one is used."""
    nothing = object()
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = pool.submit(next, items, nothing)
            yield item  # type: ignore[misc]
