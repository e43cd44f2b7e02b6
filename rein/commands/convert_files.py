"""What `rein convert` keeps on disk: the file it writes, the rejects beside it, and requests to join.

Nothing here grows with the number of rows in memory. Knows no layout.
"""

import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Self

import pyarrow.parquet as pq

from rein.data.files import Source, atomic
from rein.data.formats.kinds import KINDS_OF
from rein.data.parquet import Row, source_rows, write_rows
from rein.data.rejects import NAMED, BadRow
from rein.data.schemas import Kind

HELD: Final = 20_000  # so many rows are held, so that columns get the types of their values


def write(path: Path, rows: Iterator[Row], kind: Kind) -> None:
    """Write the rows as Parquet or JSON lines, complete or not at all, without columns that no row fills."""
    if path.suffix.lower() == ".jsonl":
        with atomic(path) as draft, draft.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return
    held = list(islice(rows, HELD))
    if len(held) < HELD:
        write_rows(path, held, KINDS_OF[kind])
        return
    filled = set[str]()
    with atomic(path) as draft:
        wide = draft.with_name(f"{draft.name}.wide")
        try:
            write_rows(wide, _noting(chain(held, rows), filled), KINDS_OF[kind])
            _narrow(wide, draft, filled)
        finally:
            wide.unlink(missing_ok=True)


def _noting(rows: Iterator[Row], filled: set[str]) -> Iterator[Row]:
    for row in rows:
        filled.update(row)
        yield row


def _narrow(wide: Path, path: Path, filled: set[str]) -> None:
    """The same table without the columns that are null in every row."""
    with pq.ParquetFile(wide) as file:
        names = [name for name in file.schema_arrow.names if name in filled]
        batches = file.iter_batches(columns=names)
        first = next(batches)
        schema = first.schema.with_metadata(file.schema_arrow.metadata)
        with pq.ParquetWriter(path.absolute(), schema, write_page_checksum=True) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch.cast(schema))


class Rejects:
    """Rows left out, written down as they come: OUT.rejects.jsonl, there only where there are some."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.rejects.jsonl")
        self.kinds, self.first = Counter[str](), list[str]()
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def total(self) -> int:
        return self.kinds.total()

    def add(self, where: str, bad: BadRow) -> None:
        self.kinds[bad.kind] += 1
        if len(self.first) < NAMED:
            self.first.append(f"{where}: {bad.reason}")
        line = {"where": where, "kind": bad.kind, "reason": bad.reason}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def summary(self, rows: int) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        return f"{self.total} of {rows} rows ({kinds}); first: {' | '.join(self.first)}"

    def keep(self) -> None:
        """Write the file; an older one that no longer holds true goes."""
        if not self.total:
            with suppress(FileNotFoundError):
                self.path.unlink()
            return
        self._file.seek(0)
        with atomic(self.path) as draft, draft.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(self._file)


class Requests(Mapping[str, Any]):
    """The requests of batch input files by custom_id, on disk."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._table = sqlite3.connect(Path(self._folder.name) / "requests.db")
        self._table.execute("create table requests (id text primary key, body text)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._table.close()
        self._folder.cleanup()

    def read(self, files: Sequence[Source]) -> None:
        found = (
            (str(row.get("custom_id")), json.dumps(row.get("body")))
            for file in files
            for _, row in source_rows(file, None, lambda where, reason: None)
        )
        self._table.executemany("insert or replace into requests values (?, ?)", found)

    def __getitem__(self, key: str) -> Any:
        found = self._table.execute("select body from requests where id = ?", (key,)).fetchone()
        if found is None:
            raise KeyError(key)
        return json.loads(found[0])

    def __len__(self) -> int:
        return int(self._table.execute("select count(*) from requests").fetchone()[0])

    def __iter__(self) -> Iterator[str]:
        return (str(key) for (key,) in self._table.execute("select id from requests"))
