"""The folder that the pages show, and nothing else: names in, paths inside it out; which of them are runs.

A run is a folder with a recipe.json or manifest.json of a whole run, or with a stage's folder. Links to
folders are not followed, and a file is opened only where it lies inside after every link is followed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rein.errors import DataError, shown

STAGES = ("sft", "reward", "rollout", "score", "train", "evaluate", "export", "report")
SKIPPED = {"rein-cache", "snapshots", "node_modules", "__pycache__"}
DEEPEST, MOST_FOLDERS = 6, 20_000  # levels below the folder, folders looked at
MOST_JSON = 32 * 2**20  # bytes of a JSON file that are read

Found = TypeVar("Found")
Stamp = tuple[int, int, int]


class Absent(DataError):
    """What is asked for is not there, or does not lie in the folder."""


class Broken(DataError):
    """A file holds something else than it should."""


class Folder:
    """The one place that turns a name into a path. `.` is the folder itself."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._kept: dict[tuple[str, str], tuple[Stamp, Any]] = {}

    def path(self, *names: str) -> Path:
        """The path of a name below the folder; raises Absent where there is none, or it leads out."""
        parts = [part for name in names for part in name.split("/")]
        parts = parts[1:] if parts[:1] == ["."] else parts
        asked = shown("/".join(parts) or ".")
        if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
            raise Absent(f"{asked}: is no name of something in this folder")
        try:
            path = self.root.joinpath(*parts).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise Absent(f"{asked}: is not there") from error
        if path != self.root and self.root not in path.parents:
            raise Absent(f"{asked}: lies outside of the folder that is shown")
        return path

    def file(self, *names: str) -> Path | None:
        """A regular file's path; None where there is none (a pipe would never end)."""
        try:
            path = self.path(*names)
            return path if stat.S_ISREG(path.stat().st_mode) else None
        except (Absent, OSError):
            return None

    def kept(self, path: Path, make: Callable[[Path], Found]) -> Found:
        """What `make` finds in a file, made again only where the file has changed."""
        key, now = (str(path), make.__qualname__), stamp(path)
        known = self._kept.get(key)
        if known is None or known[0] != now:
            known = (now, make(path))
            self._kept[key] = known
        found: Found = known[1]
        return found

    def runs(self) -> tuple[list[str], bool]:
        """The names of all runs in order, and whether there were too many folders to look at all."""
        found: list[str] = []
        waiting, seen = [("", 0)], 0
        while waiting and seen < MOST_FOLDERS:
            name, level = waiting.pop()
            seen += 1
            inner = list(_folders(self.root / name))
            is_run = _is_run(self.root / name, inner)
            if is_run:
                found.append(name or ".")
            if level < DEEPEST:
                below = [n for n in inner if not (n in SKIPPED or (is_run and _part_of_run(n)))]
                waiting += [(f"{name}/{n}" if name else n, level + 1) for n in below]
        return sorted(found), bool(waiting)


def stamp(path: Path) -> Stamp:
    """Changes whenever the file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; what JSON lacks (NaN, infinity) is None. Raises Broken."""
    try:
        if path.stat().st_size > MOST_JSON:
            raise Broken(f"{path.name}: larger than {MOST_JSON >> 20} MB; it is not read")
        body = loads(path.read_bytes())
    except OSError as error:
        raise Broken(f"{path.name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, Broken):
            raise
        raise Broken(f"{path.name}: is not JSON ({shown(str(error))})") from error
    if not isinstance(body, dict):
        raise Broken(f"{path.name}: holds no object; look at the file")
    return body


def loads(text: bytes) -> Any:
    """JSON as it is meant: NaN and infinity are no numbers."""
    return json.loads(text.decode("utf-8", "replace"), parse_constant=lambda _: None)


def _folders(path: Path) -> Iterator[str]:
    """Names of the folders inside; names that are no UTF-8 cannot stand in an address, and are left out."""
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                sayable = name.isprintable() and "\\" not in name and not name.startswith(".")
                if sayable and entry.is_dir(follow_symlinks=False):
                    yield name
    except OSError:
        return


def _part_of_run(name: str) -> bool:
    return name in STAGES or name.startswith("round-")


def _is_run(path: Path, inner: list[str]) -> bool:
    if (path / "recipe.json").is_file():
        return True
    left = ("manifest.json", "metrics.jsonl", "evaluation.json")
    return any((path / stage / name).is_file() for stage in STAGES if stage in inner for name in left)
