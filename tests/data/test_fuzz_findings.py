"""What the fuzzer (tests/fuzz) and the tries around it found, one small file each."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_made import WriteParquet

from rein.config.recipe import Data
from rein.data.loader import load_demonstrations, load_pairs, load_prompts, load_trajectories, write_rejects
from rein.data.parquet import read_rows
from rein.data.rejects import Reject
from rein.data.tokenize import Encoder
from rein.errors import DataError, shown


@pytest.mark.parametrize("name", ["a\nb", "\x00", "x" * 3000, "\u2028", "\x1b[31m"])
def test_a_column_s_name_of_any_signs_leaves_the_message_one_short_line(
    name: str, parquet: WriteParquet, raw: Encoder, data: Data
) -> None:
    for loads in (load_prompts, load_trajectories, load_pairs, load_demonstrations):
        with pytest.raises(DataError) as caught:
            loads(parquet([{name: "1"}]), raw, data)  # type: ignore[operator]
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300


def test_a_thousand_columns_are_not_all_named(parquet: WriteParquet, raw: Encoder, data: Data) -> None:
    with pytest.raises(DataError, match=r"it has \(no name\), c000, .*, c028, 970 more$"):
        load_prompts(parquet([{f"c{i:03d}": 1 for i in range(999)} | {"": 1}]), raw, data)


def test_a_role_of_any_signs_leaves_the_reason_one_short_line(
    jsonl: WriteParquet, raw: Encoder, data: Data
) -> None:
    turns = [{"role": "assistant", "content": "1"}, {"role": "a\n\u202e" * 200, "content": "2"}]
    loaded = load_trajectories(
        jsonl([{"prompt": "1", "response": turns}, {"prompt": "1", "response": "2"}]), raw, data
    )
    (reject,) = loaded.rejects
    assert reject.reason.isprintable()
    assert len(reject.reason) <= 300


def test_a_line_that_is_no_json_in_a_file_of_pairs_is_two_rows_less(
    tmp_path: Path, raw: Encoder, data: Data
) -> None:
    """A pair is two trajectories; so is a line that cannot be read: the counts are of one kind."""
    pair = json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"})
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{pair}\n{{\n{pair}\n")
    loaded = load_trajectories(path, raw, data)
    assert (len(loaded.rows), len(loaded.rejects), loaded.total) == (4, 2, 6)
    assert [r.where for r in loaded.rejects] == ["pairs.jsonl line 2 chosen", "pairs.jsonl line 2 rejected"]


def test_a_footer_that_promises_more_rows_than_there_are_is_no_shorter_file(tmp_path: Path) -> None:
    """pyarrow may give fewer rows than the footer counts, and says nothing."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2", "3"]}), path)
    content = path.read_bytes()
    at = content.rindex(b"\x16\x06")  # num_rows = 3 as a zigzag varint, in the file's own metadata
    harmed = tmp_path / "harmed.parquet"
    found = set()
    while at > 0:
        harmed.write_bytes(content[:at] + b"\x16\x08" + content[at + 2 :])
        try:
            found.add(len(list(read_rows(harmed))))
        except DataError as error:
            found.add(str(error).partition(": ")[2])
        at = content.rfind(b"\x16\x06", 0, at)
    assert "3 rows where its footer says 4; write it anew" in found
    assert 4 not in found


def test_no_room_is_made_for_the_half_gibibyte_that_a_damaged_page_claims(tmp_path: Path) -> None:
    """A stream of pyarrow's makes the room before it reads the page, and fills it with zeros."""
    path, pool = tmp_path / "rows.parquet", pa.default_memory_pool()
    pq.write_table(pa.table({"prompt": ["1"] * 3}), path, use_dictionary=False, compression="none")
    content, claimed = path.read_bytes(), bytes.fromhex("8080808004")  # 2^29 as a zigzag varint
    assert content[4:10] == bytes.fromhex("1500152a152a")  # a data page of 21 bytes, 21 in the file
    path.write_bytes(content[:9] + claimed + content[10:])
    before = pool.max_memory()
    with pytest.raises(DataError, match=r"rows.parquet row 0: cannot be read \(.*536870912.*\)"):
        list(read_rows(path))
    assert pool.max_memory() <= max(before, 2**26)


def test_json_text_noted_for_a_column_that_holds_lists_is_a_note_and_no_more(
    tmp_path: Path, raw: Encoder, data: Data
) -> None:
    """A tool that rewrote the column kept the file's metadata."""
    schema = pa.schema(
        [("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))],
        metadata={b"rein.json": b'["prompt"]'},
    )
    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "rows.parquet")
    assert load_prompts(tmp_path / "rows.parquet", raw, data).rows[0].text == "1+1="


def test_a_map_with_a_key_twice_costs_its_row(tmp_path: Path, raw: Encoder, data: Data) -> None:
    kind = pa.map_(pa.string(), pa.string())
    maps = pa.array([[("a", "1"), ("a", "2")], [("a", "1")]], type=kind)
    pq.write_table(pa.table({"prompt": ["1", "2"], "extra_info": maps}), tmp_path / "rows.parquet")
    loaded = load_prompts(tmp_path / "rows.parquet", raw, data)
    assert [row.extra_info for row in loaded.rows] == [{"a": "1"}]
    assert [reject.kind for reject in loaded.rejects] == ["unreadable"]


def test_a_lone_surrogate_in_a_json_escape_costs_its_row_and_the_report_is_valid(
    tmp_path: Path, raw: Encoder, data: Data
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1\\ud83d"}\n{"prompt": "1", "x\\ud83d": 2}\n')
    loaded = load_prompts(path, raw, data)
    assert (len(loaded.rows), len(loaded.rejects)) == (1, 1)
    write_rejects(tmp_path / "rejects.jsonl", [*loaded.rejects, Reject("\ud83d", "\ud83d")])
    (tmp_path / "rejects.jsonl").read_text(encoding="utf-8")


def test_what_is_shown_of_a_text_is_one_line_of_bounded_length() -> None:
    assert shown("a\nb\x00\ud800é") == "a\\nb\\x00\\ud800é"
    assert len(shown("x" * 999)) == 80


@pytest.mark.parametrize("margin", [3.5e38, -1e300, float("nan"), float("inf")])
def test_a_margin_that_a_tensor_cannot_hold_costs_its_row(
    margin: float, jsonl: WriteParquet, raw: Encoder, data: Data
) -> None:
    pair = {"prompt": "1", "chosen": "2", "rejected": "3"}
    loaded = load_pairs(jsonl([pair, pair | {"margin": margin}]), raw, data)
    assert [reject.kind for reject in loaded.rejects] == ["margin not finite"]
