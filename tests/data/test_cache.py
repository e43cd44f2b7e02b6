"""Claims about the cache of what frozen models said."""

import json
from pathlib import Path

import numpy as np
import pytest

from rein.data.cache import ScoreCache

ROWS = {
    "a": np.array([-0.5, -1.25], np.float32),
    "b": np.array([], np.float32),
    "c": np.array([3.0], np.float32),
}


def test_what_was_added_is_found_again_by_the_next_reader(tmp_path: Path) -> None:
    ScoreCache(tmp_path, "ref_log_probs", "weights/1").add(ROWS)
    again = ScoreCache(tmp_path, "ref_log_probs", "weights/1")
    for row_key, values in ROWS.items():
        found = again.get(row_key)
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)
    assert again.get("d") is None
    assert (again.hits, again.misses, len(again)) == (3, 1, 3)


@pytest.mark.parametrize(("kind", "key"), [("ref_log_probs", "weights/2"), ("scores", "weights/1")])
def test_another_key_or_kind_misses(tmp_path: Path, kind: str, key: str) -> None:
    ScoreCache(tmp_path, "ref_log_probs", "weights/1").add(ROWS)
    assert ScoreCache(tmp_path, kind, key).get("a") is None


def test_two_writers_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = (ScoreCache(tmp_path, "scores", "k") for _ in range(2))
    one.add({"a": ROWS["a"]})
    two.add({"c": ROWS["c"]})
    two.add({"a": ROWS["a"]})
    again = ScoreCache(tmp_path, "scores", "k")
    assert len(again) == 2
    assert not again.notes
    assert one.get("c") is None  # what it opened with is what it knows


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_shard_is_left_out_with_a_note_and_the_others_are_read(tmp_path: Path, damage: str) -> None:
    first = ScoreCache(tmp_path, "scores", "k")
    first.add({f"row {i}": np.full(50, i, np.float32) for i in range(50)})
    (shard,) = first.folder.glob("*.parquet")
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 0xFF
    changed = {"cut": content[:-30], "flip": content, "empty": b"", "foreign": b'{"a": 1}'}[damage]
    shard.write_bytes(bytes(changed))
    first.add({"c": ROWS["c"]})
    again = ScoreCache(tmp_path, "scores", "k")
    assert len(again) == 1
    assert again.get("c") is not None
    (note,) = again.notes
    assert shard.name in note


def test_the_key_lies_beside_the_shards_in_words(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, "scores", "weights/template/1.0")
    cache.add(ROWS)
    assert json.loads((cache.folder / "key.json").read_text()) == {
        "kind": "scores",
        "key": "weights/template/1.0",
    }
    assert cache.folder.parent == tmp_path / "scores"


def test_kept_numbers_do_not_follow_the_callers_array(tmp_path: Path) -> None:
    cache, values = ScoreCache(tmp_path, "scores", "k"), np.array([1.0], np.float32)
    cache.add({"a": values})
    values[0] = 9.0
    np.testing.assert_array_equal(cache.get("a"), [1.0])
