"""Rows into files as other tools write them, and bytes of files harmed; says how many rows a file holds.

`make` is a function of seed and number alone. Knows nothing of the loader.
"""

import datetime
import decimal
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_rows import KINDS, Row, good_rows, harmed

CODECS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
NOTES: tuple[dict[bytes, bytes], ...] = (
    {},
    {b"rein.schema": b"trajectories/1"},
    {b"rein.schema": b"trajectories/99"},
    {b"rein.schema": b"\xff\xfe"},
    {b"rein.json": b'["prompt", "reward_model"]'},
    {b"rein.json": b"{"},
    {b"rein.json": b"[1, null]"},
    {b"pandas": b'{"index_columns": []}'},
    {b"huggingface": b"{"},
)


@dataclass(frozen=True)
class Case:
    """One file. `rows`: how many it holds by pyarrow's or json's word; None: its container is harmed."""

    number: int
    path: Path
    kind: str
    rows: int | None
    did: str


def make(seed: int, number: int, folder: Path) -> Case:
    """File `number` of a seed."""
    draw = random.Random(f"{seed}:{number}")
    kind = KINDS[number % len(KINDS)]
    rows = harmed(good_rows(kind, draw), draw)
    did, path = "parquet", folder / f"{number}.parquet"
    if draw.random() < 0.5:
        _write_parquet(path, rows, draw)
    else:
        did, path = _write_json(folder / str(number), rows, draw)
    counted: int | None = _rows_of(path)
    if draw.random() < 0.35:
        name = draw.choice(sorted(BYTES))
        path.write_bytes(BYTES[name](path.read_bytes(), draw))
        did, counted = f"{did}, {name}", _rows_of(path)
    return Case(number, path, kind, counted, did)


def _rows_of(path: Path) -> int | None:
    """The rows that a reader who knows only the container finds; None where it finds no container."""
    if path.suffix == ".parquet":
        try:
            return int(pq.read_table(path, page_checksum_verification=True).num_rows)
        except Exception:
            return None
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if content.lstrip()[:1] != b"[":
        return sum(bool(line.removeprefix(b"\xef\xbb\xbf").strip()) for line in content.split(b"\n"))
    try:
        return len(json.loads(content))
    except Exception:
        return None


def _write_parquet(path: Path, rows: list[Row], draw: random.Random) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column([row.get(name) for row in rows], draw) for name in names]
    if names and draw.random() < 0.05:
        names, columns = [*names, names[0]], [*columns, columns[draw.randrange(len(columns))]]
    schema = pa.schema([pa.field(n, c.type) for n, c in zip(names, columns, strict=True)])
    table = pa.Table.from_arrays(columns, schema=schema.with_metadata(draw.choice(NOTES)))
    if draw.random() < 0.03:
        table = table.slice(0, 0)
    pq.write_table(
        table,
        path,
        row_group_size=draw.choice((1, 3, 100)),
        compression=draw.choice(CODECS),
        use_dictionary=draw.random() < 0.5,
        data_page_version=draw.choice(("1.0", "2.0")),
        write_page_checksum=draw.random() < 0.5,
        store_schema=draw.random() < 0.8,
    )


def _column(values: list[Any], draw: random.Random) -> pa.Array:
    """A column's array in one of the types that could hold it."""
    try:
        array = pa.array(values)
    except Exception:
        array = pa.array([None if v is None else _escaped(json.dumps(v, default=str)) for v in values])
    if _has_empty_struct(array.type):
        array = pa.array([None if v is None else json.dumps(v, default=str) for v in values])
    for turn in draw.sample(TURNS, 3):
        try:
            found = turn(array)
            if found.type != array.type:  # not every type can be written
                pq.write_table(pa.table({"a": found}), pa.BufferOutputStream())
        except Exception:
            continue
        return found
    return array


def _escaped(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _has_empty_struct(kind: pa.DataType) -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not inner) or any(_has_empty_struct(each) for each in inner)


def _listed(make_list: Callable[[pa.DataType], pa.DataType], values: pa.DataType | None = None) -> Any:
    def turn(array: pa.Array) -> pa.Array:
        if not pa.types.is_list(array.type):
            raise TypeError
        inner = values or array.type.value_type
        return pa.array(array.cast(pa.list_(inner)).to_pylist(), type=make_list(inner))

    return turn


def _as_map(array: pa.Array) -> pa.Array:
    if not pa.types.is_struct(array.type):
        raise TypeError
    pairs = [None if v is None else [(k, str(x)) for k, x in v.items()] for v in array.to_pylist()]
    return pa.array(pairs, type=pa.map_(pa.string(), pa.string()))


def _sized(array: pa.Array) -> pa.Array:
    return pa.array(array.to_pylist(), type=pa.list_(array.type.value_type, len(array[0])))


TURNS: tuple[Callable[[pa.Array], pa.Array], ...] = (
    lambda array: array,
    lambda array: array,
    lambda array: array.dictionary_encode(),
    lambda array: array.cast(pa.large_string()),
    lambda array: array.cast(pa.string_view()),
    lambda array: array.cast(pa.binary()),
    lambda array: array.cast(pa.decimal128(20, 4)),
    lambda array: array.cast(pa.float16()),
    lambda array: array.cast(pa.bool_()),
    lambda array: array.cast(pa.timestamp("ns")),
    lambda array: array.cast(pa.duration("s")),
    _listed(pa.large_list),
    _listed(pa.list_view),
    _listed(pa.list_, pa.uint64()),
    _listed(pa.list_, pa.int8()),
    _listed(pa.large_list, pa.uint8()),
    _listed(pa.list_, pa.float16()),
    _listed(pa.list_, pa.float64()),
    _listed(pa.list_, pa.decimal128(20, 6)),
    _listed(pa.list_, pa.string()),
    _sized,
    _as_map,
)


def _write_json(stem: Path, rows: list[Row], draw: random.Random) -> tuple[str, Path]:
    lines = [json.dumps(row, ensure_ascii=draw.random() < 0.7, default=_plain) for row in rows]
    if draw.random() < 0.1:
        at = draw.randrange(len(lines))
        lines[at] = lines[at].replace('": ', '": 0, "prompt": ', 1)  # a key twice
    if draw.random() < 0.25:
        path = stem.with_suffix(".json")
        text = "[" + draw.choice((",", ", ", ",\n")).join(lines) + draw.choice(("]", "]\n", " ] \n"))
    else:
        path = stem.with_suffix(".jsonl")
        text = draw.choice(("\n", "\r\n", "\n\n")).join(lines) + draw.choice(("", "\n"))
    mark = "\ufeff" if draw.random() < 0.1 else ""
    path.write_bytes((mark + text).encode("utf-8", draw.choice(("replace", "surrogatepass"))))
    return path.suffix[1:], path


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, decimal.Decimal | datetime.datetime | datetime.date | datetime.timedelta):
        return str(value)
    return np.asarray(value).tolist()


def _flipped(content: bytes, draw: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(draw.choice((1, 3, 30)) if found else 0):
        found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


def _without_a_piece(content: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(content) + 1)
    return content[:begin] + content[begin + draw.choice((1, 10, 200)) :]


def _piece_twice(content: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(content) + 1)
    return content[:begin] + content[begin : begin + 50] + content[begin:]


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(content) + 1)
    size = min(draw.choice((4, 64)), len(content) - begin)
    return content[:begin] + bytes(size) + content[begin + size :]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes flipped": _flipped,
    "cut short": lambda content, draw: content[: draw.randrange(len(content) + 1)],
    "a piece gone": _without_a_piece,
    "a piece twice": _piece_twice,
    "zeroed": _zeroed,
    "emptied": lambda content, draw: b"",
    "more behind": lambda content, draw: content + draw.choice((b"\x00" * 9, b"\n{", b"PAR1", b"]", b"\n[]")),
    "more before": lambda content, draw: draw.choice((b"\x00", b"PAR1", b"\n", b"[", b"\xff\xfe")) + content,
    "utf-16": lambda content, draw: content.decode("latin-1").encode("utf-16"),
}
