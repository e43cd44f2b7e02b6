"""One run at a time in an output folder: `<out>/.lock`, held while the run lasts.

The operating system drops the lock when its process dies, however it dies: there is none to remove by hand.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rein.errors import CheckpointError

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of a file system that knows none
_held: set[Path] = set()  # by this process


@contextmanager
def held(out: Path, key: str = "out") -> Iterator[None]:  # key: what the user calls the folder
    """Inside, no other process is in this block for the same folder, which is made if need be.

    A process may enter again what it holds. Raises CheckpointError where another holds it, or where the
    folder cannot be written.
    """
    folder = out.resolve()
    if folder in _held:
        yield
        return
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _locked(folder / NAME)
    except BlockingIOError:
        raise CheckpointError(
            f"{key}: {out} is in use by {_holder(folder / NAME)}; wait for it or choose another {_said(key)}"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{key}: {out} cannot be written to ({error.strerror}); free space or choose another {_said(key)}"
        ) from error
    _held.add(folder)
    try:
        yield
    finally:
        _held.discard(folder)
        (folder / NAME).unlink(missing_ok=True)  # before the lock goes: who waits would lock a dead file
        os.close(handle)
        if not there:
            with suppress(OSError):  # it goes again where nothing came into it
                folder.rmdir()


def _said(key: str) -> str:
    return key if key.startswith("-") else f"{key}="


def _locked(file: Path) -> int:
    """A handle of the locked file, which says who holds it. Raises BlockingIOError where another does."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle)
            if _is(handle, file):
                _sign(handle, file)
                return handle
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _sign(handle: int, file: Path) -> None:
    """Write down who holds the file; where that cannot be done, nothing is left of it."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": round(time.time())}
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{json.dumps(who)}\n".encode())
    except OSError:
        file.unlink(missing_ok=True)
        raise


def _is(handle: int, file: Path) -> bool:
    """Whether the open file is still the one of that name: its last holder may just have removed it."""
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _holder(file: Path) -> str:
    try:
        who = json.loads(file.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(who["since"]))
        return f"process {who['pid']} on {who['host']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
