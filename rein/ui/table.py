"""A Parquet file of rows that may be large: read by row groups and by the columns asked for, never whole.

What is computed over all rows (a measure, a text search, an order) is kept as one array a file until the file
changes. What cannot be read is a Broken with one sentence, whatever is wrong with the file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rein.errors import shown
from rein.ui import measures
from rein.ui.folder import Broken, Stamp, stamp

Array = npt.NDArray[Any]

UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, KeyError, TypeError)
BATCH_ROWS, BATCH_BYTES = 4096, 16 * 2**20  # decoded at a time
MOST_ROWS = 5_000_000  # of a file that is searched or sorted
MOST_TABLES, MOST_KEPT = 8, 32  # files at hand; selections kept of each
TEXTS = ("prompt", "response", "before", "after")  # columns that a text search reads


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked of a file: rows that hold a text, within these bounds, in this order."""

    text: str = ""
    bounds: tuple[tuple[str, float | None, float | None], ...] = ()  # (measure, least, most)
    order: str = ""  # a measure
    descending: bool = False


@dataclass(slots=True)
class Table:
    """One file as it was at one moment."""

    path: Path
    schema: pa.Schema
    meta: Any  # pq.FileMetaData
    kept: OrderedDict[Any, Any] = field(default_factory=OrderedDict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def rows(self) -> int:
        return int(self.meta.num_rows)

    def measures(self) -> dict[str, measures.Measure]:
        return measures.of(self.schema)

    def measure(self, name: str) -> Array:
        """One number a row, NaN where there is none."""
        with self.lock:
            if name not in self.kept:
                self._refuse_many()
                made = self.measures()[name]
                parts = [made.of(batch) for _, batch in self.batches(made.columns)]
                self._keep(name, np.concatenate(parts) if parts else np.zeros(0))
            found: Array = self.kept[name]
            return found

    def select(self, query: Query) -> Array | range:
        """The numbers of the rows that are asked for, in order."""
        if query == Query():
            return range(self.rows)
        with self.lock:
            if query not in self.kept:
                self._keep(query, self._select(query))
            found: Array = self.kept[query]
            return found

    def take(self, numbers: Sequence[int], columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """These rows in this order, of these columns."""
        names = self.schema.names if columns is None else [n for n in self.schema.names if n in columns]
        wanted = sorted(set(map(int, numbers)))
        found: dict[int, dict[str, Any]] = {}
        with self.lock:
            for first, batch in self.batches(names, wanted):
                here = [n for n in wanted if first <= n < first + batch.num_rows]
                found |= {n: _row(batch.slice(n - first, 1)) for n in here}
        return [found[int(n)] for n in numbers if int(n) in found]

    def batches(
        self, columns: Sequence[str], wanted: Sequence[int] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The file's batches with the number of their first row; only those up to the last wanted row, of
        row groups that hold one.
        """
        with _reading(self.path), pq.ParquetFile(self.path, metadata=self.meta, pre_buffer=False) as file:
            first = 0
            for group in range(self.meta.num_row_groups):
                rows = self.meta.row_group(group).num_rows
                here = [n for n in wanted or () if first <= n < first + rows]
                if (wanted is None or here) and rows:
                    yield from self._group(file, group, first, list(columns), max(here, default=first + rows))
                first += rows

    def _group(
        self, file: Any, group: int, first: int, columns: list[str], last: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        meta = self.meta.row_group(group)
        size = max(1, min(BATCH_ROWS, BATCH_BYTES * meta.num_rows // max(1, meta.total_byte_size)))
        for batch in file.iter_batches(
            batch_size=size, row_groups=[group], columns=columns, use_threads=False
        ):
            yield first, batch
            first += batch.num_rows
            if first > last:
                return

    def _select(self, query: Query) -> Array:
        self._refuse_many()
        held = np.ones(self.rows, dtype=bool)
        for name, least, most in query.bounds:
            values = self.measure(name)
            held &= values >= least if least is not None else True
            held &= values <= most if most is not None else True
        if query.text:
            held &= self._search(query.text)
        numbers = np.flatnonzero(held)
        if query.order:
            values = self.measure(query.order)[numbers]
            order = np.argsort(-values if query.descending else values, kind="stable")  # NaN comes last
            numbers = numbers[order]
        return numbers

    def _search(self, text: str) -> Array:
        """Which rows hold the text in a prompt or response, whatever its case."""
        key = ("text", text)
        if key not in self.kept:
            columns = [name for name in TEXTS if name in self.schema.names and _searchable(self.schema, name)]
            parts = [
                np.logical_or.reduce([_holds(batch.column(i), text) for i in range(batch.num_columns)])
                for _, batch in (self.batches(columns) if columns else ())
            ]
            self._keep(key, np.concatenate(parts) if parts else np.zeros(self.rows, dtype=bool))
        found: Array = self.kept[key]
        return found

    def _keep(self, key: Any, value: Array) -> None:
        self.kept[key] = value
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)

    def _refuse_many(self) -> None:
        if self.rows > MOST_ROWS:
            raise Broken(f"{self.path.name}: more than {MOST_ROWS:,} rows are not searched or sorted")


class Tables:
    """The files opened last."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, tuple[Stamp, Table]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path) -> Table:
        """Raises Broken where it is no Parquet file that can be shown."""
        with self._lock, _reading(path):
            now, known = stamp(path), self._open.pop(path, None)
            if known is None or known[0] != now:
                known = (now, _opened(path))
            self._open[path] = known
            while len(self._open) > MOST_TABLES:
                self._open.popitem(last=False)
            return known[1]


def _opened(path: Path) -> Table:
    meta = pq.read_metadata(path)
    schema = meta.schema.to_arrow_schema()
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise Broken(f"{path.name}: two columns are called {shown(twice[0])}; rename one")
    return Table(path, schema, meta)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever a damaged file raises is one sentence."""
    try:
        yield
    except Broken:
        raise
    except UNREADABLE as error:
        why = shown(str(error).partition("\n")[0] or type(error).__name__)
        raise Broken(f"{path.name}: cannot be read as Parquet ({why})") from error


def _row(batch: pa.RecordBatch) -> dict[str, Any]:
    """One row as Python has it; a value that Python has no form for is a sentence."""
    found: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            found[name] = column.to_pylist()[0]
        except UNREADABLE as error:
            found[name] = f"(cannot be shown: {shown(str(error))})"
    return found


def _searchable(schema: pa.Schema, name: str) -> bool:
    kind = schema.field(name).type
    return measures.is_text(kind) or _messages(kind)


def _messages(kind: pa.DataType) -> bool:
    """Whether a column holds chat messages."""
    if not measures.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    inner = kind.value_type
    at = inner.get_field_index("content")
    return bool(at >= 0 and measures.is_text(inner.field(at).type))


def _holds(column: pa.Array, text: str) -> Array:
    if not measures.is_text(column.type):
        inside = pc.struct_field(pc.list_flatten(column), "content")
        found = np.zeros(len(column), dtype=bool)
        parents = measures.floats(pc.list_parent_indices(column)).astype(np.int64)
        found[parents[_holds(inside, text)]] = True
        return found
    hits = pc.match_substring(column, text, ignore_case=True)
    return measures.floats(hits) > 0
