"""Claims about the cache of what frozen models said."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rein.data.cache import ScoreCache
from rein.data.cache_entries import entries, remove

ROOT = Path(__file__).parents[2]
KEY = {"weights": "1", "numeric path": "float32 cpu"}
ROWS = {
    "a": np.array([-0.5, -1.25], np.float32),
    "b": np.array([], np.float32),
    "c": np.array([3.0], np.float32),
}


def test_what_was_added_is_found_again_by_the_next_reader(tmp_path: Path) -> None:
    ScoreCache(tmp_path, "ref_log_probs", KEY).add(ROWS)
    again = ScoreCache(tmp_path, "ref_log_probs", KEY)
    for row_key, values in ROWS.items():
        found = again.get(row_key)
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)
    assert again.get("d") is None
    assert (again.hits, again.misses, len(again)) == (3, 1, 3)


@pytest.mark.parametrize(("kind", "key"), [("ref_log_probs", {"weights": "2"}), ("scores", KEY)])
def test_another_key_or_kind_misses(tmp_path: Path, kind: str, key: str) -> None:
    ScoreCache(tmp_path, "ref_log_probs", KEY).add(ROWS)
    assert ScoreCache(tmp_path, kind, key).get("a") is None


def test_two_writers_lose_nothing_of_each_other(tmp_path: Path) -> None:
    one, two = (ScoreCache(tmp_path, "scores", KEY) for _ in range(2))
    one.add({"a": ROWS["a"]})
    two.add({"c": ROWS["c"]})
    two.add({"a": ROWS["a"]})
    again = ScoreCache(tmp_path, "scores", KEY)
    assert len(again) == 2
    assert not again.notes
    assert one.get("c") is None  # what it opened with is what it knows


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
def test_a_damaged_shard_is_left_out_with_a_note_and_the_others_are_read(tmp_path: Path, damage: str) -> None:
    first = ScoreCache(tmp_path, "scores", KEY)
    first.add({f"row {i}": np.full(50, i, np.float32) for i in range(50)})
    (shard,) = first.folder.glob("*.parquet")
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 0xFF
    changed = {"cut": content[:-30], "flip": content, "empty": b"", "foreign": b'{"a": 1}'}[damage]
    shard.write_bytes(bytes(changed))
    first.add({"c": ROWS["c"]})
    again = ScoreCache(tmp_path, "scores", KEY)
    assert len(again) == 1
    assert again.get("c") is not None
    (note,) = again.notes
    assert shard.name in note


def test_the_key_lies_beside_the_shards_in_words(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, "scores", KEY, {"model": "models/a"})
    cache.add(ROWS)
    body = json.loads((cache.folder / "key.json").read_text())
    assert body == {"kind": "scores", "key": KEY, "about": {"model": "models/a"}}
    assert cache.folder.parent == tmp_path / "scores"


def test_what_is_told_of_a_key_and_its_order_are_no_part_of_it(tmp_path: Path) -> None:
    ScoreCache(tmp_path, "scores", KEY, {"model": "here"}).add(ROWS)
    again = ScoreCache(tmp_path, "scores", dict(reversed(KEY.items())), {"model": "there"})
    assert "a" in again
    assert (again.hits, again.misses) == (0, 0)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from rein.data.cache import ScoreCache
from rein.data.cache_entries import entries, remove
cache = ScoreCache(Path(sys.argv[1]), "scores", {"weights": "1"})
print("begun", flush=True)
for shard in range(10 ** 6 if sys.argv[3] == "on" else int(sys.argv[3])):
    cache.add({f"{sys.argv[2]} {shard} {i}": np.full(50, i, np.float32) for i in range(100)})
"""


def writer(folder: Path, name: str, shards: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(folder), name, shards]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.stdout.close()
    return process


def test_two_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    both = [writer(tmp_path, name, "15") for name in ("one", "other")]
    assert [process.wait(60) for process in both] == [0, 0]
    found = ScoreCache(tmp_path, "scores", {"weights": "1"})
    assert len(found) == 2 * 15 * 100
    assert not found.notes
    assert sorted({p.suffix for p in found.folder.iterdir()}) == [".json", ".parquet"]


def test_a_writer_killed_at_any_moment_leaves_whole_shards_and_drafts_that_are_swept(tmp_path: Path) -> None:
    for delay in (0.0, 0.05, 0.1):
        process = writer(tmp_path, str(delay), "on")
        time.sleep(delay)
        process.kill()
        process.wait()
    cache = ScoreCache(tmp_path, "scores", {"weights": "1"})
    assert not cache.notes
    assert len(cache) % 100 == 0
    cache.add({"a": ROWS["a"]})  # there is a folder, whenever the writers were killed
    draft = cache.folder / f".{'0' * 32}.parquet.01234567"
    young = cache.folder / f".{'1' * 32}.parquet.01234567"
    foreign = cache.folder / ".notes.parquet.old"
    for file in (draft, young, foreign):
        file.write_bytes(b"half")
    for file in (draft, foreign):
        os.utime(file, (0, 0))
    cache.add({"b": ROWS["b"]})
    assert [f.exists() for f in (draft, young, foreign)] == [False, True, True]
    assert not ScoreCache(tmp_path, "scores", {"weights": "1"}).notes


def test_an_entry_pruned_under_a_writer_is_made_again(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, "scores", KEY)
    cache.add({"a": ROWS["a"]})
    remove(entries(tmp_path)[0])
    assert not cache.folder.exists()
    cache.add({"c": ROWS["c"]})
    again = ScoreCache(tmp_path, "scores", KEY)
    assert ("a" in again, "c" in again, len(entries(tmp_path))) == (False, True, 1)


def test_kept_numbers_do_not_follow_the_callers_array(tmp_path: Path) -> None:
    cache, values = ScoreCache(tmp_path, "scores", KEY), np.array([1.0], np.float32)
    cache.add({"a": values})
    values[0] = 9.0
    np.testing.assert_array_equal(cache.get("a"), [1.0])
