"""Files in, rows out, and back: Parquet and JSON are streamed; writing is all or nothing.

A row is a dict with a place, `where` = "part-003.parquet row 118": rows count from 0 in each file, as in a
data frame; "line 8" counts lines from 1, as in an editor. Nested structs lose their None entries, which
writers of Arrow tables put where a row had no such key. Knows nothing of what the columns mean.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rein.data import schemas
from rein.data.arrow_types import has_empty_struct, in_microseconds, is_text
from rein.data.files import Files, Source, atomic, first_line, is_parquet, sources
from rein.data.json_rows import json_form, json_values
from rein.errors import DataError, shown

Row = dict[str, Any]
Bad = Callable[[str, str], None]  # told (where, reason) of what is no row

BATCH_ROWS, BATCH_BYTES = 1024, 16 * 2**20  # read at a time: fewer rows where they are long
GROUP_ROWS = 8192
BUFFER_BYTES = 1 << 20  # read at a time of a long column; pre-buffering would hold the whole file in the end
SNIFFED_ROWS = 100  # JSON rows looked at for the names of columns
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError)
_UNWRITABLE = (pa.ArrowException, ValueError, TypeError, OverflowError)


def read_rows(
    files: Files, columns: Iterable[str] | None = None, bad: Bad | None = None
) -> Iterator[tuple[str, Row]]:
    """Every row of the files with its place, a row group at a time.

    What is no row (a broken JSON line, text that is not UTF-8) goes to `bad`. Raises DataError at once for a
    missing file; while reading for one that is empty or unreadable, for files without any row, and without
    `bad` for what is no row.
    """
    return _all_rows(sources(files), None if columns is None else set(columns), bad or _refuse)


def columns_of(source: Source) -> list[str]:
    """The names of a file's columns; of JSON, those of the first hundred rows."""
    if is_parquet(source):
        with _opened(source) as file:
            return list(file.schema_arrow.names)
    rows = islice(json_values(source), SNIFFED_ROWS)
    return list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row))


def metadata_of(source: Source) -> dict[str, str]:
    """What the writer noted about a Parquet file; nothing for JSON."""
    if not is_parquet(source):
        return {}
    with _opened(source) as file:
        noted = file.schema_arrow.metadata or {}
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in noted.items()}


def row_count(source: Source) -> int:
    """The rows of a Parquet file, by its own note."""
    with _opened(source) as file:
        return int(file.metadata.num_rows)


def source_rows(source: Source, columns: set[str] | None, bad: Bad) -> Iterator[tuple[str, Row]]:
    """The rows of one file, of the columns asked for."""
    if is_parquet(source):
        for first, batch, as_json in read_batches(source, columns):
            yield from batch_rows(source, range(first, first + batch.num_rows), batch, as_json, bad)
        return
    for where, value in json_values(source):
        if isinstance(value, Exception):
            bad(where, f"not JSON ({first_line(value)})")
        elif not isinstance(value, dict):
            bad(where, f"a {type(value).__name__} where an object with columns is expected")
        else:
            yield (
                where,
                clean_row(value if columns is None else {k: v for k, v in value.items() if k in columns}),
            )


def read_batches(
    source: Source, columns: set[str] | None = None, batch_bytes: int | None = None
) -> Iterator[tuple[int, pa.RecordBatch, list[str]]]:
    """A Parquet file's batches: number of the first row, the batch, its columns that hold JSON text.

    A batch has BATCH_ROWS rows, or about so many decoded bytes.
    """
    with _opened(source) as file:
        wanted = [name for name in file.schema_arrow.names if columns is None or name in columns]
        as_json = [name for name in _json_columns(file) if name in wanted]
        rows = _rows_at_once(file) if batch_bytes is None else _rows_within(file, set(wanted), batch_bytes)
        batches, first = file.iter_batches(batch_size=rows, columns=wanted), 0
        while True:
            try:
                batch = in_microseconds(next(batches, None))
            except _UNREADABLE as error:
                what = first_line(error)
                raise DataError(
                    f"{source.name} row {first}: cannot be read ({what}); write it anew"
                ) from error
            if batch is None:
                break
            yield first, batch, as_json
            first += batch.num_rows
        if first != file.metadata.num_rows:
            raise DataError(
                f"{source.name}: {first} rows where its footer says {file.metadata.num_rows}; write it anew"
            )


def batch_rows(
    source: Source, numbers: Sequence[int], batch: pa.RecordBatch, as_json: list[str], bad: Bad
) -> Iterator[tuple[str, Row]]:
    """A batch's rows, with their numbers in the file."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except (*_UNREADABLE, KeyError):
        rows = [None] * batch.num_rows  # read one at a time below, to find the one that cannot be
    for index, (number, row) in enumerate(zip(numbers, rows, strict=True)):
        where = f"{source.name} row {number}"
        try:
            row = batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")[0] if row is None else row
            for name in as_json:
                row[name] = None if row[name] is None else json.loads(row[name])
        except (*_UNREADABLE, TypeError, KeyError, RecursionError) as error:
            bad(where, f"cannot be read ({first_line(error)})")
            continue
        yield where, clean_row(row)


def write_rows(
    path: Path | str,
    rows: Iterable[Mapping[str, Any]],
    schema: pa.Schema,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write rows as one Parquet file, complete or not at all; returns how many.

    A sequence lacks the columns that none of its rows fills, and its free columns take the type of their
    values; a stream has every column, and free ones hold JSON text. Raises DataError when a value does not
    fit its column.
    """
    path = Path(path)
    if isinstance(rows, Sequence):
        if unknown := sorted(set(chain.from_iterable(rows)) - set(schema.names)):
            raise schemas.missing(f"{path.name}: the schema", unknown[0], schema.names)
        filled = {name for row in rows for name, value in row.items() if value is not None}
        names = [name for name in schema.names if name in filled or not filled]
        fields = [_field(schema.field(name), [row.get(name) for row in rows]) for name in names]
    else:
        fields = [_field(field, None) for field in schema]
    as_json = [field.name for field in fields if schemas.JSON_KEY in (field.metadata or {})]
    noted = {key.encode(): value.encode() for key, value in (metadata or {}).items()}
    noted |= {**(schema.metadata or {}), schemas.JSON_KEY: json.dumps(as_json).encode()}
    final, stream, total = pa.schema(fields, metadata=noted), iter(rows), 0
    # Absolute: Arrow would take a relative name with a colon for another file system's.
    with atomic(path.absolute()) as draft, pq.ParquetWriter(draft, final, write_page_checksum=True) as writer:
        while chunk := list(islice(stream, GROUP_ROWS)):
            arrays = [_array(path.name, field, chunk, as_json=field.name in as_json) for field in fields]
            writer.write_table(pa.Table.from_arrays(arrays, schema=final))
            total += len(chunk)
    return total


def clean_row(row: Row) -> Row:
    """The row without the None entries of its nested structs; its columns all stay."""
    return {key: clean(value) if isinstance(value, dict | list) else value for key, value in row.items()}


def clean(value: Any) -> Any:
    """A struct without its None entries, at every depth."""
    if isinstance(value, dict):
        return {key: clean(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(next((v for v in value if v is not None), None), dict | list):
        return [clean(inner) for inner in value]
    return value


def no_rows(found: Iterable[Source]) -> DataError:
    names = ", ".join(source.name for source in found)
    return DataError(f"{names}: no rows; give a file that has some")


def _all_rows(found: list[Source], columns: set[str] | None, bad: Bad) -> Iterator[tuple[str, Row]]:
    empty = True
    for source in found:
        for item in source_rows(source, columns, bad):
            empty = False
            yield item
    if empty:
        raise no_rows(found)


def _refuse(where: str, reason: str) -> None:
    raise DataError(f"{where}: {reason}; mend or remove it")


@contextmanager
def _opened(source: Source) -> Iterator[pq.ParquetFile]:
    try:
        meta = pq.read_metadata(source.path)
        how = {"page_checksum_verification": True, "pre_buffer": False, "buffer_size": _buffer_bytes(meta)}
        file = pq.ParquetFile(source.path, metadata=meta, **how)
        names = file.schema_arrow.names
    except _UNREADABLE as error:
        what = first_line(error)
        raise DataError(f"{source.name}: not a readable Parquet file ({what}); write it anew") from error
    with file:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{source.name}: two columns are called `{shown(twice[0])}`; rename one")
        written = (file.schema_arrow.metadata or {}).get(schemas.SCHEMA_KEY, b"").decode(errors="replace")
        version = written.rpartition("/")[2]
        if version.isdecimal() and int(version) > schemas.VERSION:
            raise DataError(
                f"{source.name}: written by a newer Rein (schema {shown(written)}); upgrade Rein to read it"
            )
        yield file


def _buffer_bytes(meta: pq.FileMetaData) -> int:
    """0, whole columns of a row group at once, unless they are long: a page of a column that is at hand
    cannot be longer than it, while a stream makes room for up to the 2 GiB that a damaged page may claim.
    """
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    sizes = [[group.column(i).total_compressed_size for i in range(group.num_columns)] for group in groups]
    return BUFFER_BYTES if max(map(sum, sizes), default=0) > BATCH_BYTES else 0


def _rows_at_once(file: pq.ParquetFile) -> int:
    """How many rows are decoded together: as Python's lists they take many times their bytes in the file."""
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=1)
    return min(BATCH_ROWS, max(1, BATCH_BYTES // max(longest, 1)))


def _json_columns(file: pq.ParquetFile) -> list[str]:
    try:
        names = json.loads((file.schema_arrow.metadata or {}).get(schemas.JSON_KEY, b"[]"))
    except ValueError:
        return []  # a damaged note: the columns are then read as the text they are
    texts = {field.name for field in file.schema_arrow if is_text(field.type)}
    return [name for name in names if name in texts] if isinstance(names, list) else []


def _rows_within(file: pq.ParquetFile, wanted: set[str], size: int) -> int:
    """How many rows of these columns decode to about `size` bytes, by the file's own counts."""
    decoded, meta = 0, file.metadata
    for group in map(meta.row_group, range(meta.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in wanted:
                decoded += max(8 * column.num_values, column.total_uncompressed_size)
    rows: int = size * meta.num_rows // max(decoded, 1)
    return max(1, min(GROUP_ROWS, rows))


def _field(field: pa.Field, values: list[Any] | None) -> pa.Field:
    """The field with the type it is written with."""
    if schemas.FREE_KEY not in (field.metadata or {}):
        return field
    kind = None if values is None else _fitting_type(values)
    return (
        pa.field(field.name, kind)
        if kind
        else pa.field(field.name, pa.string(), metadata={schemas.JSON_KEY: b"1"})
    )


def _fitting_type(values: list[Any]) -> pa.DataType | None:
    """The Arrow type that gives these values back as they are; None where there is no such type."""
    try:
        array = pa.array(values)
        same = clean(array.to_pylist()) == clean(values)
    except _UNWRITABLE:
        return None
    return array.type if same and not has_empty_struct(array.type) else None


def _array(file: str, field: pa.Field, rows: list[Mapping[str, Any]], *, as_json: bool) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    try:
        if as_json:
            values = [
                None if v is None else json.dumps(v, ensure_ascii=False, default=json_form) for v in values
            ]
        return pa.array(values, type=field.type)
    except _UNWRITABLE as error:
        what = first_line(error)
        raise DataError(
            f"{file}: column `{shown(field.name)}` cannot be written ({what}); mend its values"
        ) from error
