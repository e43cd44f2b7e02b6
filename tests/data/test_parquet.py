"""Claims about reading and writing files of rows."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_made import WriteParquet
from hypothesis import given, settings
from hypothesis import strategies as st

from rein.data import schemas
from rein.data.files import sources
from rein.data.parquet import columns_of, metadata_of, read_rows, write_rows
from rein.errors import CheckpointError, DataError

ROWS = [{"prompt": "a", "score": 1.0}, {"prompt": "b", "score": None}]


def rows_of(files: Any, **options: Any) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(files, **options)]


def test_a_row_is_known_by_its_file_and_its_number_in_it(parquet: WriteParquet, tmp_path: Path) -> None:
    parquet(ROWS, "part-0.parquet")
    parquet(ROWS, "part-1.parquet")
    found = list(read_rows(tmp_path))
    assert [where for where, _ in found] == [f"part-{i}.parquet row {j}" for i in (0, 1) for j in (0, 1)]
    assert [row for _, row in found] == ROWS * 2


def test_two_files_of_one_name_are_told_apart(parquet: WriteParquet, tmp_path: Path) -> None:
    files = [parquet(ROWS[:1], "a/train.parquet"), parquet(ROWS[:1], "b/train.parquet")]
    assert [where for where, _ in read_rows(files)] == [f"{file} row 0" for file in files]


def test_rows_are_numbered_through_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"n": list(range(2500))}), path, row_group_size=700)
    assert [(where, row["n"]) for where, row in read_rows(path)] == [
        (f"many.parquet row {n}", n) for n in range(2500)
    ]


@pytest.mark.parametrize("pattern", ["*.parquet", "p?rt-[01].parquet", "**/*.parquet", "."])
def test_globs_and_folders_give_every_shard_once_in_order(
    parquet: WriteParquet, tmp_path: Path, pattern: str
) -> None:
    for name in ("part-1.parquet", "part-0.parquet", ".hidden.parquet"):
        parquet(ROWS[:1], name)
    (tmp_path / "dataset_info.json").write_text("{}")
    if pattern == ".":
        parquet(ROWS, "_temporary/part-9.parquet")
    assert [where for where, _ in read_rows(str(tmp_path / pattern))] == [
        "part-0.parquet row 0",
        "part-1.parquet row 0",
    ]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
@pytest.mark.parametrize(
    "text", ['{"a": 1}\n\n{"a": [null]}\n', '[{"a": 1},\n {"a": [null]}]', '\ufeff[{"a":1},{"a":[null]}] ']
)
def test_json_lines_and_json_lists_give_the_same_rows(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert list(read_rows(path)) == [(f"{name} row 0", {"a": 1}), (f"{name} row 1", {"a": [None]})]
    assert columns_of(sources(path)[0]) == ["a"]


def test_a_json_list_with_elements_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    rows = [{"text": "x" * size} for size in (10, 200_000, 3, 70_000)]
    path = tmp_path / "long.json"
    path.write_text(json.dumps(rows, indent=1))
    assert rows_of(path) == rows


def test_what_is_no_row_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n{"a": 5}\n')
    told: list[tuple[str, str]] = []
    assert rows_of(path, bad=lambda where, reason: told.append((where, reason))) == [{"a": 1}, {"a": 5}]
    assert [where for where, _ in told] == ["log.jsonl line 2", "log.jsonl line 3", "log.jsonl row 3"]
    with pytest.raises(DataError, match=r"^log\.jsonl line 2: not JSON .*; mend or remove it$"):
        rows_of(path)


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1}', "[", '[{"a": 1}] x', "[{'a': 1}]"])
def test_a_json_list_that_breaks_off_is_an_error_with_its_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"^rows\.json row [01]: "):
        rows_of(path)


@pytest.mark.parametrize("name", ["train.parquet", "openai/gsm8k", "shards/*.parquet"])
def test_a_missing_file_is_said_at_once_before_any_row_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"no such file or folder \(nothing is downloaded\)|no file matches"):
        read_rows(str(tmp_path / name))


def test_a_missing_file_is_answered_with_the_nearest_name(parquet: WriteParquet, tmp_path: Path) -> None:
    parquet(ROWS, "train.parquet")
    with pytest.raises(DataError, match=r"did you mean .*train\.parquet\?"):
        read_rows(tmp_path / "trian.parquet")


def test_empty_unreadable_and_foreign_files_are_one_line_each(tmp_path: Path, parquet: WriteParquet) -> None:
    whole = parquet(ROWS, "whole.parquet").read_bytes()
    cases = {
        "zero.parquet": (b"", "the file is empty"),
        "zero.jsonl": (b"", "the file is empty"),
        "text.parquet": (b"version https://git-lfs", "not a readable Parquet file"),
        "cut.parquet": (whole[:-20], "not a readable Parquet file"),
        "table.csv": (b"a,b\n1,2\n", "not a kind of file that is read"),
        "blank.jsonl": (b"\n\n", "no rows"),
        "none.json": (b"[]", "no rows"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=said) as caught:
            rows_of(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith(name)


def test_a_parquet_file_without_rows_is_an_error_but_an_empty_shard_beside_others_is_not(
    parquet: WriteParquet, tmp_path: Path
) -> None:
    schema = pa.schema([("prompt", pa.string()), ("score", pa.float64())])
    empty = parquet([], "part-0.parquet", schema)
    with pytest.raises(DataError, match=r"part-0\.parquet: no rows"):
        rows_of(empty)
    parquet(ROWS, "part-1.parquet")
    assert rows_of(tmp_path) == ROWS


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(DataError, match="two columns are called `a`"):
        rows_of(path)


def test_a_file_of_a_newer_schema_is_refused(parquet: WriteParquet) -> None:
    path = parquet(ROWS, schema=pa.schema([("prompt", pa.string())], metadata={"rein.schema": "prompts/2"}))
    with pytest.raises(DataError, match="written by a newer Rein"):
        rows_of(path)


def test_none_entries_of_nested_structs_are_taken_out(parquet: WriteParquet) -> None:
    """Arrow gives every struct of a column the keys of all: what a row did not have comes back as None."""
    sent = [
        {"prompt": [{"role": "user", "content": "a"}], "extra_info": {"index": 1}},
        {"prompt": [{"role": "user", "content": "b", "name": "x"}], "extra_info": {"split": {"of": "train"}}},
    ]
    assert rows_of(parquet(sent)) == sent


def test_dictionary_large_and_fixed_size_columns_read_like_plain_ones(tmp_path: Path) -> None:
    path = tmp_path / "odd.parquet"
    table = pa.table(
        {
            "word": pa.array(["x", "y", "x"]).dictionary_encode(),
            "large": pa.array(["x", "y", None], pa.large_string()),
            "lists": pa.array([[1], [2, 3], None], pa.large_list(pa.int32())),
            "fixed": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float16(), 2)),
            "nothing": pa.nulls(3),
        }
    )
    pq.write_table(table, path)
    assert rows_of(path) == [
        {"word": "x", "large": "x", "lists": [1], "fixed": [1.0, 2.0], "nothing": None},
        {"word": "y", "large": "y", "lists": [2, 3], "fixed": [1.0, 2.0], "nothing": None},
        {"word": "x", "large": None, "lists": None, "fixed": [1.0, 2.0], "nothing": None},
    ]


def test_text_that_is_not_utf_8_costs_its_row_only(tmp_path: Path) -> None:
    path = tmp_path / "bytes.parquet"
    raw = pa.array([b"a", b"\xff", b"c"], pa.binary())
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 3, raw.buffers())}), path)
    told: list[str] = []
    assert rows_of(path, bad=lambda where, reason: told.append(where)) == [{"text": "a"}, {"text": "c"}]
    assert told == ["bytes.parquet row 1"]


def test_only_the_columns_asked_for_are_read(parquet: WriteParquet, jsonl: WriteParquet) -> None:
    for path in (parquet(ROWS), jsonl(ROWS)):
        assert rows_of(path, columns=["score", "absent"]) == [{"score": 1.0}, {"score": None}]


def test_written_rows_come_back_equal_and_carry_their_schema_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.parquet"
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "response_ids": np.array([1, 2]), "score": 0.5},
        {"prompt": [{"role": "user", "content": "b"}], "response_ids": [3], "score": None},
    ]
    assert write_rows(path, rows, schemas.TRAJECTORIES, {"tokenizer": "abc"}) == 2
    assert rows_of(path) == [rows[0] | {"response_ids": [1, 2]}, rows[1]]
    noted = metadata_of(sources(path)[0])
    assert (noted["rein.schema"], noted["tokenizer"]) == ("trajectories/1", "abc")


@pytest.mark.parametrize(
    "values",
    [
        ["text", [{"role": "user", "content": "a"}]],
        [{"index": 1}, {"index": "one"}],
        [{}, {}],
        [{"deep": {"empty": {}}}, {"deep": {"empty": {}}}],
        ["1000", ["1000", "1e3"]],
        ['[{"role": "user"}]', "plain"],
    ],
)
def test_free_columns_keep_values_that_share_no_type(tmp_path: Path, values: list[Any]) -> None:
    path = tmp_path / "free.parquet"
    write_rows(path, [{"prompt": "p", "extra_info": value} for value in values], schemas.PROMPTS)
    assert [row["extra_info"] for row in rows_of(path)] == values


JSON = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, width=32) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(JSON, min_size=1, max_size=4), streamed=st.booleans())
def test_any_free_value_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], streamed: bool
) -> None:
    path = tmp_path_factory.mktemp("free") / "rows.parquet"
    rows = [{"prompt": "p", "extra_info": value} for value in values]
    write_rows(path, iter(rows) if streamed else rows, schemas.PROMPTS)
    assert [row["extra_info"] for row in rows_of(path)] == values


def test_a_stream_of_rows_is_written_like_a_list(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response_ids": [i]} for i in range(9000)]
    assert write_rows(tmp_path / "s.parquet", iter(rows), schemas.TRAJECTORIES) == 9000
    found = rows_of(tmp_path / "s.parquet", columns=["prompt", "response_ids"])
    assert found == rows


def test_a_failed_write_leaves_the_old_file_and_nothing_half_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"score": 1.0}], schemas.TRAJECTORIES)
    with pytest.raises(DataError, match=r"rows\.parquet: column `score` cannot be written"):
        write_rows(path, [{"score": "high"}], schemas.TRAJECTORIES)
    with pytest.raises(DataError, match="no column `scroe`; did you mean `score`"):
        write_rows(path, [{"scroe": 1.0}], schemas.TRAJECTORIES)
    assert [row["score"] for row in rows_of(path)] == [1.0]
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    (tmp_path / ".rows.parquet.0badcafe").write_bytes(b"half")
    write_rows(tmp_path / "rows.parquet", [{"score": 1.0}], schemas.TRAJECTORIES)
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_a_place_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_rows(tmp_path / "file" / "rows.parquet", [{"score": 1.0}], schemas.TRAJECTORIES)


def test_a_flipped_byte_in_a_page_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [{"score": float(i)} for i in range(100)], schemas.TRAJECTORIES)
    content = bytearray(path.read_bytes())
    content[120] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"rows\.parquet"):
        rows_of(path)
