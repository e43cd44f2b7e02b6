"""Shards that are kept: found whole under their key, or not at all."""

from pathlib import Path

import pyarrow as pa
import pytest

from rein.data.shards import ShardFolder, content_key

KEY, OTHER = content_key([b"one"]), content_key([b"other"])
TABLE = pa.table({"score": pa.array([1.0, None, float("nan")]), "ids": [[1, 2], [], [3]]})


@pytest.fixture
def shards(tmp_path: Path) -> ShardFolder:
    return ShardFolder(tmp_path / "score" / "shards")


def test_what_was_written_is_found_under_its_key(shards: ShardFolder) -> None:
    assert shards.read(KEY) is None
    shards.write(KEY, TABLE)
    found = shards.read(KEY)
    assert found is not None
    assert found.to_pydict()["ids"] == TABLE.to_pydict()["ids"]
    assert found.schema.types == TABLE.schema.types
    assert shards.read(OTHER) is None


@pytest.mark.parametrize("harm", ["cut", "flipped", "no table", "renamed", "a folder"])
def test_a_damaged_file_is_not_there(shards: ShardFolder, harm: str) -> None:
    shards.write(KEY, TABLE)
    file = shards.folder / f"{KEY}.parquet"
    body = file.read_bytes()
    match harm:
        case "cut":
            file.write_bytes(body[:-20])
        case "flipped":
            place = body.index(b"\x03\x00\x00\x00", 40)
            file.write_bytes(body[:place] + b"\xff" + body[place + 1 :])
        case "no table":
            file.write_bytes(b"")
        case "renamed":
            file.unlink()
            shards.write(OTHER, TABLE)
            (shards.folder / f"{OTHER}.parquet").rename(file)
        case _:
            file.unlink()
            file.mkdir()
    assert shards.read(KEY) is None


def test_removing_leaves_what_is_not_a_shard(shards: ShardFolder) -> None:
    shards.write(KEY, TABLE)
    shards.write(OTHER, TABLE)
    (shards.folder / f".{KEY}.parquet.0123abcd").write_text("a draft")
    (shards.folder / "mine.txt").write_text("mine")
    shards.remove()
    assert [path.name for path in shards.folder.iterdir()] == ["mine.txt"]
    (shards.folder / "mine.txt").unlink()
    shards.remove()
    assert not shards.folder.exists()
    shards.remove()


def test_a_key_tells_parts_apart() -> None:
    assert content_key([b"ab", b"c"]) != content_key([b"a", b"bc"])
    assert content_key([b"ab"]) == content_key([b"ab"])
