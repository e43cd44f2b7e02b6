"""Columns in every Arrow type that could hold them are read as the same rows."""

import datetime
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rein.config.recipe import Data
from rein.data.files import sources
from rein.data.loader import Loaded, load_prompts, load_trajectories
from rein.data.parquet import read_batches, read_rows
from rein.data.tokenize import Encoder
from rein.types import Trajectory

IDS, LOG_PROBS = [[21, 22, 1], [23, 24, 1]], [[-0.5, -0.25, -1.0], [-2.0, -0.125, -0.5]]
TURNS = [[{"role": "user", "content": "1+1="}], [{"role": "user", "content": "2+2="}]]
Read = Callable[..., Loaded[Trajectory]]


@pytest.fixture
def read(tmp_path: Path, raw: Encoder, data: Data) -> Read:
    """Two rows, one column of which is given as an array."""

    def of(**columns: pa.Array) -> Loaded[Trajectory]:
        base = {
            "prompt": pa.array(["1+1=", "2+2="]),
            "response_ids": pa.array(IDS),
            "behavior_log_probs": pa.array(LOG_PROBS),
            "score": pa.array([1.0, 0.0]),
        }
        pq.write_table(pa.table(base | columns), tmp_path / "rows.parquet", row_group_size=1)
        return load_trajectories(tmp_path / "rows.parquet", raw, data, scored=True)

    return of


def the_same(loaded: Loaded[Trajectory]) -> None:
    assert not loaded.rejects
    assert [row.messages for row in loaded.rows] == ["1+1=", "2+2="]
    assert [row.response_ids.tolist() for row in loaded.rows] == IDS
    assert all(row.response_ids.dtype == np.int64 for row in loaded.rows)
    assert [row.behavior_log_probs.tolist() for row in loaded.rows] == LOG_PROBS  # type: ignore[union-attr]
    assert [row.score for row in loaded.rows] == [1.0, 0.0]


WHOLE = [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float64()]
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 3)]


@pytest.mark.parametrize("make", LISTS, ids=["list", "large_list", "list_view", "large_list_view", "fixed"])
@pytest.mark.parametrize("kind", WHOLE, ids=str)
def test_ids_in_every_list_of_every_whole_type(make: Any, kind: pa.DataType, read: Read) -> None:
    the_same(read(response_ids=pa.array(IDS, type=make(kind))))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64(), pa.decimal128(12, 4)], ids=str)
def test_log_probs_in_every_float_and_decimals(kind: pa.DataType, read: Read) -> None:
    turn = {pa.float16(): np.float16, pa.decimal128(12, 4): lambda x: Decimal(str(x))}.get(kind, float)
    values = [[turn(x) for x in row] for row in LOG_PROBS]
    the_same(read(behavior_log_probs=pa.array(values, type=pa.list_(kind))))


@pytest.mark.parametrize(
    "scores",
    [
        pa.array([True, False]),
        pa.array([1, 0], type=pa.int8()),
        pa.array([np.float16(1), np.float16(0)]),
        pa.array([Decimal("1.0"), Decimal("0.0")], type=pa.decimal256(50, 2)),
        pa.array([1.0, 0.0]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_scores_as_bool_int_half_decimal_and_dictionary(scores: pa.Array, read: Read) -> None:
    the_same(read(score=scores))


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int8(), pa.string()),
    ],
    ids=str,
)
def test_text_of_every_kind_bytes_too(kind: pa.DataType, read: Read) -> None:
    the_same(read(prompt=pa.array(["1+1=", "2+2="]).cast(kind)))


def test_bytes_that_are_no_text_cost_their_row(read: Read) -> None:
    loaded = read(prompt=pa.array([b"\xff\xfe", b"2+2="]))
    assert [reject.reason for reject in loaded.rejects] == [
        "prompt is a bytes, not text or a list of messages"
    ]
    assert len(loaded.rows) == 1


@pytest.mark.parametrize(
    "prompts",
    [
        pa.array(TURNS),
        pa.array([t[0] for t in TURNS]),
        pa.array([[{**t[0], "name": None, "tool_calls": None, "weight": [None]}] for t in TURNS]),
        pa.array([[{**t[0], "content": [{"text": t[0]["content"], "image": None}]}] for t in TURNS]),
        pa.array([[list(t[0].items())] for t in TURNS], type=pa.list_(pa.map_(pa.string(), pa.string()))),
        pa.array(['[{"role": "user", "content": "1+1="}]', '[{"role": "user", "content": "2+2="}]']),
    ],
    ids=["messages", "one message", "filled with None", "parts", "maps", "JSON text"],
)  # fmt: skip
def test_messages_in_every_layout(prompts: pa.Array, read: Read) -> None:
    the_same(read(prompt=prompts))


def test_keys_that_pandas_filled_with_none_are_not_there(tmp_path: Path) -> None:
    filled = {"index": 1, "answer": None, "deep": {"a": None, "b": [None, {"c": None, "d": 2}]}}
    pq.write_table(pa.Table.from_pylist([{"extra_info": filled}]), tmp_path / "rows.parquet")
    ((_, row),) = read_rows(tmp_path / "rows.parquet")
    assert row["extra_info"] == {"index": 1, "deep": {"b": [None, {"d": 2}]}}


def test_a_null_column_is_a_column_that_is_not_there(read: Read) -> None:
    loaded = read(behavior_log_probs=pa.nulls(2), group=pa.nulls(2), finish_reason=pa.nulls(2))
    assert [row.behavior_log_probs for row in loaded.rows] == [None, None]
    assert [row.group for row in loaded.rows] == ["1+1=", "2+2="]


def test_nanoseconds_as_pandas_writes_them_do_not_cost_the_row(read: Read, tmp_path: Path) -> None:
    when = pa.array([1_700_000_000_123_456_789] * 2, type=pa.timestamp("ns", "UTC"))
    loaded = read(
        extra_info=pa.StructArray.from_arrays([when, when.cast(pa.int64())], names=["when", "n"]),
        created=when,
        took=pa.array([1, 2], type=pa.duration("ns")),
        at=pa.array([1, 2], type=pa.time64("ns")),
    )
    the_same(loaded)
    assert loaded.rows[0].extra_info["when"].year == 2023
    rows = [row for _, row in read_rows(tmp_path / "rows.parquet", ["created", "took", "at"])]
    assert rows[0]["created"].microsecond == 123456
    assert rows[0]["took"] == datetime.timedelta(0)


def test_labels_may_be_numbers_uuids_and_sglangs_struct(read: Read) -> None:
    one = uuid.UUID(int=1)
    loaded = read(
        group=pa.array([one.bytes, one.bytes], type=pa.uuid()),
        finish_reason=pa.array([{"type": "stop", "matched": 1}, {"type": "length", "matched": None}]),
    )
    assert [row.group for row in loaded.rows] == [str(one)] * 2
    assert [row.finish_reason for row in loaded.rows] == ["stop", "length"]
    assert [row.group for row in read(group=pa.array([7, 8])).rows] == ["7", "8"]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[21.5, 1.0]], "float64 values, not integers"),
        ([[21.0, None]], "nulls or mixed values"),
        ([[1e300, 1.0]], "float64 values, not integers"),
    ],
)
def test_floats_that_are_no_whole_numbers_are_no_ids(ids: Any, said: str, read: Read) -> None:
    loaded = read(response_ids=pa.array([*ids, IDS[1]]))
    assert said in loaded.rejects[0].reason


def test_true_among_numbers_is_no_id_and_no_log_prob(raw: Encoder, data: Data, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1", "response_ids": [true, 21]}\n{"prompt": "1", "response_ids": [21]}\n')
    loaded = load_trajectories(path, raw, data)
    assert [r.reason for r in loaded.rejects] == ["response_ids holds true and false among other values"]


def test_shards_a_glob_and_a_folder_are_the_same_rows(tmp_path: Path, raw: Encoder, data: Data) -> None:
    for i in range(3):
        (tmp_path / "part").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"prompt": [f"{i}+{j}=" for j in range(5)]}),
            tmp_path / "part" / f"{i}.parquet",
            row_group_size=2,
        )
    whole = [str(tmp_path / "part" / f"{i}.parquet") for i in range(3)]
    ways = [
        whole,
        str(tmp_path / "part"),
        str(tmp_path / "part" / "*.parquet"),
        str(tmp_path / "**" / "?.parquet"),
    ]
    found = [[(row.where, row.messages) for row in load_prompts(way, raw, data).rows] for way in ways]
    assert len(found[0]) == 15
    assert all(each == found[0] for each in found)


def test_a_file_is_read_row_group_by_row_group(tmp_path: Path) -> None:
    """The first rows are there before the last row group is read: it may even be broken."""
    path = tmp_path / "rows.parquet"
    table = pa.table({"prompt": [f"{i:06d}" * 9 for i in range(6000)]})
    pq.write_table(
        table, path, row_group_size=2000, compression="none", use_dictionary=False, write_page_checksum=True
    )
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 0xFF
    path.write_bytes(content)
    rows = read_rows(path)
    assert next(rows)[1]["prompt"] == "000000" * 9
    with pytest.raises(Exception, match="cannot be read"):
        list(rows)


@pytest.mark.parametrize(("tokens", "most"), [(10, 1024), (20_000, 1024), (200_000, 40)])
def test_fewer_rows_are_decoded_together_where_rows_are_long(tokens: int, most: int, tmp_path: Path) -> None:
    """A batch is lists of Python numbers: 1,024 rows of 200,000 tokens would be gigabytes of them."""
    draw = np.random.default_rng(0)
    rows = 2048 if tokens == 10 else 60
    ids = pa.array(draw.integers(0, 2**40, rows * tokens))
    column = pa.ListArray.from_arrays(pa.array(range(0, rows * tokens + 1, tokens), pa.int32()), ids)
    pq.write_table(pa.table({"response_ids": column}), tmp_path / "rows.parquet", compression="none")
    sizes = [batch.num_rows for _, batch, _ in read_batches(sources(tmp_path / "rows.parquet")[0])]
    assert sum(sizes) == rows
    assert max(sizes) <= most
    assert max(sizes) * tokens <= 16 * 2**20 / 4
