"""sha256 of files by content; what a process has read it does not read again, unless the file changed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

WHOLE_UP_TO = 8 * 2**30  # bytes; of larger files size, time and a sample are hashed: their copies are others
SAMPLES, SAMPLE_BYTES = 64, 2**14


def hash_file(file: Path, *, whole: bool = False) -> str:
    """sha256 of a file; of a sample, and marked so, where it is too large, unless `whole` is asked for."""
    status = file.stat()
    whole = whole or status.st_size <= WHOLE_UP_TO
    return _hashed(file, status.st_ino, status.st_size, status.st_mtime_ns, whole)


def hash_all(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 of the names that files go by and of their contents, in the order given."""
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _hashed(file: Path, inode: int, size: int, mtime_ns: int, whole: bool) -> str:
    with file.open("rb") as opened:
        if whole:
            return hashlib.file_digest(opened, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size} {mtime_ns}".encode())
        for sample in range(SAMPLES):
            opened.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
    return f"sampled-{digest.hexdigest()}"
