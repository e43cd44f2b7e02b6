"""What lies in a cache folder, and how it is made smaller: folder in, entries out.

An entry is a folder whose name is the hash of the key that its key.json holds; nothing else is listed, and
only shards, drafts and key.json of an entry are ever removed. Knows no model and no recipe.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rein.data.cache import DRAFT, NOTE, SHARD, key_hash


@dataclass(frozen=True, slots=True)
class Entry:
    """What one model said, of one kind."""

    folder: Path
    kind: str
    key: dict[str, str]
    about: dict[str, str]
    rows: int
    bytes: int
    used: float  # seconds since the epoch


def entries(folder: Path) -> list[Entry]:
    """All entries, the one used longest ago first."""
    return sorted(_found(folder), key=lambda entry: (entry.used, entry.folder))


def _found(folder: Path) -> Iterator[Entry]:
    for note in folder.glob(f"*/*/{NOTE}") if folder.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads(note.read_text(encoding="utf-8"))
            kind, key, about = str(body["kind"]), dict(body["key"]), dict(body["about"])
            place = note.parent
            ours = place.name == key_hash(key) and place.parent.name == kind and not place.is_symlink()
            if ours:
                files = _files(place)
                rows = sum(_rows(file) for file in files if SHARD.fullmatch(file.name))
                size = sum(file.stat().st_size for file in files)
                yield Entry(place, kind, key, about, rows, size, note.stat().st_mtime)


def _files(folder: Path) -> list[Path]:
    """The files that the cache has made, key.json last."""
    found = [f for f in folder.iterdir() if SHARD.fullmatch(f.name) or DRAFT.fullmatch(f.name)]
    return [f for f in (*sorted(found), folder / NOTE) if f.is_file() and not f.is_symlink()]


def _rows(shard: Path) -> int:
    try:
        return int(pq.read_metadata(shard).num_rows)
    except (pa.ArrowException, OSError):
        return 0


def chosen(
    found: Sequence[Entry],  # the one used longest ago first
    *,
    now: float,
    older_than: float | None,  # seconds without use
    max_size: int | None,  # bytes that may stay
    everything: bool = False,
) -> list[Entry]:
    """What to remove: all that is too old, then what was used longest ago until the rest is small enough."""
    gone = [e for e in found if everything or (older_than is not None and now - e.used > older_than)]
    if max_size is not None:
        left = sum(entry.bytes for entry in found) - sum(entry.bytes for entry in gone)
        for entry in found:
            if left > max_size and entry not in gone:
                gone.append(entry)
                left -= entry.bytes
    return gone


def remove(entry: Entry) -> None:
    """Remove an entry; files in its folder that the cache did not make stay, and the folder with them."""
    for file in _files(entry.folder):
        file.unlink(missing_ok=True)
    for folder in (entry.folder, entry.folder.parent):
        with suppress(OSError):
            folder.rmdir()
