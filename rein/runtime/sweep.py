"""Ends what a Ray cluster of this machine leaves behind: `python sweep.py FOLDER` waits until its standard
input closes, which it does however its starter ends, then does so.

A process belongs to the cluster when it was started with the cluster's folder or has a file in it open.
Imports nothing but the standard library: it is run by its path.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

ROUNDS = 3  # what is being started while others end is found by the next one


def sweep(folder: str) -> None:
    """Kill the processes of the cluster of `folder`, which then goes too."""
    for _ in range(ROUNDS):
        found = [
            number for number in map(int, filter(str.isdigit, os.listdir("/proc"))) if _of(number, folder)
        ]
        for number in found:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)


def _of(number: int, folder: str) -> bool:
    own = Path("/proc") / str(number)
    if number in (os.getpid(), os.getppid()):  # the latter: who started this and goes on without a cluster
        return False
    with suppress(OSError):  # it has ended, or is another user's
        if f"{folder}/".encode() in (own / "cmdline").read_bytes():
            return True
        return any(_target(link).startswith(f"{folder}/") for link in (own / "fd").iterdir())
    return False


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
