"""Names of files in, existing files out; and the one way a file is written: complete or not at all.

Knows nothing of what the files hold.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rein.drafts import draft_of
from rein.errors import CheckpointError, DataError, shown

Files = str | Path | Sequence[str | Path]

SUFFIXES = (".parquet", ".jsonl", ".json")
METADATA = (  # what holds no row
    *("manifest.json", "recipe.json", "audit.json", "state.json"),
    *("dataset_info.json", "dataset_infos.json"),
)
PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Source:
    """One file, and the shortest name that tells it from the others."""

    path: Path
    name: str


def sources(files: Files) -> list[Source]:
    """The files behind names, globs and folders of shards, in a fixed order.

    Raises DataError for one that is missing; nothing is ever looked up on a hub.
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise DataError("files: none given; name a .parquet, .jsonl or .json file, a glob or a folder")
    paths = [path for entry in given for path in _expand(os.path.expanduser(str(entry)))]
    names = Counter(path.name for path in paths)
    return [Source(path, shown(path.name if names[path.name] == 1 else str(path), 400)) for path in paths]


def unread(files: Files) -> list[str]:
    """A line for each kind of file that stands in a given folder beside those that are read."""
    given = [files] if isinstance(files, str | Path) else list(files)
    lines = []
    for folder in dict.fromkeys(folder for entry in given for folder in _folders(str(entry))):
        kinds = _by_suffix(folder)
        for suffix, paths in kinds[1:]:
            many = f"{len(paths)} {suffix} files" if len(paths) > 1 else f"1 {suffix} file"
            lines.append(f"{folder}: {many} beside the {kinds[0][0]} files not read: name them to read them")
    return lines


def _folders(entry: str) -> list[Path]:
    entry = os.path.expanduser(entry)
    hits = [entry] if os.path.exists(entry) else sorted(glob.glob(entry, recursive=True))
    return [Path(hit) for hit in hits if os.path.isdir(hit)]


def is_parquet(source: Source) -> bool:
    """Parquet or JSON, by the first bytes and the name.

    Raises DataError for a file that is empty, closed to us or of another kind.
    """
    try:
        with source.path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(
            f"{source.name}: cannot be opened ({error.strerror}); check its permissions"
        ) from error
    if not head:
        raise DataError(f"{source.name}: the file is empty (0 bytes); write it anew")
    suffix = source.path.suffix.lower()
    if suffix not in SUFFIXES and head != PARQUET_MAGIC:
        raise DataError(f"{source.name}: not a kind of file that is read; convert it to .parquet or .jsonl")
    return suffix == ".parquet" or head == PARQUET_MAGIC


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A draft in the same folder that replaces `path` when the block ends well, and else is removed."""
    draft = draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        what = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be written ({what}); check the disk and the folder") from error
    finally:
        with suppress(OSError):  # the error above says more
            draft.unlink(missing_ok=True)


def first_line(error: Exception) -> str:
    """An error of a library in one line."""
    return shown((str(error).splitlines() or [type(error).__name__])[0], 200)


def _expand(entry: str) -> list[Path]:
    path = Path(entry)
    if path.is_dir():
        return _shards(path)
    if path.exists():
        return [path]
    if any(sign in entry for sign in "*?["):
        hits = [Path(hit) for hit in sorted(glob.glob(entry, recursive=True))]
        found = [file for hit in hits for file in (_shards(hit) if hit.is_dir() else [hit])]
        if found:
            return found
        raise DataError(f"{entry}: no file matches; check the pattern and the folder")
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1, cutoff=0.7)
    hint = (
        f"did you mean {path.parent / close[0]}?" if close else "give a local .parquet, .jsonl or .json file"
    )
    raise DataError(f"{entry}: no such file or folder (nothing is downloaded); {hint}")


def _shards(folder: Path) -> list[Path]:
    """The files of the first kind that the folder has: metadata beside Parquet shards is no row."""
    found = _by_suffix(folder)
    if not found:
        raise DataError(f"{folder}: the folder has no .parquet, .jsonl or .json file of rows; check the path")
    return found[0][1]


def _by_suffix(folder: Path) -> list[tuple[str, list[Path]]]:
    """The files that may hold rows, by kind; kinds without one are not there."""
    kinds = [
        (suffix, sorted(p for p in folder.rglob(f"*{suffix}") if p.is_file() and _of_rows(p, folder)))
        for suffix in SUFFIXES
    ]
    return [(suffix, paths) for suffix, paths in kinds if paths]


def _of_rows(path: Path, folder: Path) -> bool:
    about = path.name in METADATA or path.name.endswith("rejects.jsonl")
    return not about and not _hidden(path.relative_to(folder))


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)
