"""Runs programs that nobody vouches for: code in, what it printed or which tests it passed out.

Each program runs in processes of its own session, shut in by rein/jail, with an empty environment and a
scratch folder that is removed. A crash, a hang, a fork bomb or endless output costs that program its result
and nothing else. Knows no reward.
"""

import dataclasses
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rein.errors import ReinError
from rein.jail import tests, walls
from rein.jail.walls import Limits as Limits

WORDS = {
    walls.NAMESPACES: "each answer runs without network, other processes or files but the interpreter's",
    walls.LIMITS: (
        "this kernel allows no namespaces, so answers run with limits on time, memory and processes only: "
        "they can reach the network and the files of this user; use a container for answers you do not trust"
    ),
}
TICK = 0.1  # seconds between two looks at the stop flag
_PACKAGE = str(Path(__file__).resolve().parents[2])
_START = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from rein.jail.process import main
del sys.path[0]
main()
"""
# Hashes of text are fixed, so that a set's order and with it a score is the same in every run.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
_PYTHON = (sys.executable, "-B", "-P", "-s", "-S", "-X", "utf8", "-c", _START, _PACKAGE)


class Stopped(Exception):
    """`Sandbox.stop` was called while a program ran."""


class Sandbox:
    """Programs under the same limits at one level of isolation; may be used from many threads."""

    def __init__(self, limits: Limits, level: str) -> None:
        self.limits, self.level = limits, level
        self._stop = threading.Event()

    def stop(self) -> None:
        """End what runs, now; for an interrupt. `run_...` raise Stopped from then on, until `resume`."""
        self._stop.set()

    def resume(self) -> None:
        self._stop.clear()

    def run_program(self, code: str, given: str) -> str | None:
        """What the program printed, reading `given`; None where it did not end well within its limits."""
        with self._folder() as scratch:
            work = {"role": "program", "code": code, "given": given}
            with self._started(work, scratch, [], subprocess.PIPE) as process:
                assert process.stdout is not None
                printed = self._drain(process.stdout.fileno(), self.limits.output)
                if printed is None or not self._ended(process):
                    return None
        return printed.decode("utf-8", "replace")

    def run_tests(self, code: str, plan: dict[str, Any]) -> bytes:
        """A letter for each test of the plan that ran, as jail/tests.py reports; ENDED where all did."""
        ours, theirs = os.pipe(), os.pipe()
        report, write = os.pipe()
        try:
            with self._folder() as one, self._folder() as two:
                side = {"role": "answer", "code": code}
                with self._started(side, one, [ours[0], theirs[1]]):
                    role = {"role": "tests", "plan": plan}
                    with self._started(role, two, [theirs[0], ours[1], write]):
                        for fd in (*ours, *theirs, write):
                            os.close(fd)
                        ours = theirs = (-1, -1)
                        write = -1
                        return self._drain(report, 1 << 20, keep=True) or b""
        finally:
            for fd in (*ours, *theirs, report, write):
                if fd >= 0:
                    os.close(fd)

    def _drain(self, fd: int, most: int, *, keep: bool = False) -> bytes | None:
        """All that is written until the far end closes; with `keep`, what there is when the time is up."""
        found, end = bytearray(), time.monotonic() + self.limits.seconds
        while len(found) <= most and (left := end - time.monotonic()) > 0:
            if self._stop.is_set():
                raise Stopped
            if select.select([fd], [], [], min(left, TICK))[0]:
                chunk = os.read(fd, 1 << 16)
                if not chunk or (keep and tests.ENDED in chunk):
                    return bytes(found + chunk)
                found += chunk
        return bytes(found) if keep else None

    def _ended(self, process: "subprocess.Popen[bytes]") -> bool:
        try:
            return process.wait(self.limits.seconds) == 0
        except subprocess.TimeoutExpired:
            return False

    @contextmanager
    def _folder(self) -> Iterator[str]:
        folder = tempfile.mkdtemp(prefix="rein-code-")
        try:
            yield folder
        finally:
            _remove(folder)

    @contextmanager
    def _started(
        self, work: dict[str, Any], scratch: str, fds: list[int], out: int = subprocess.DEVNULL
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """The work in a process that is gone, with all it started, when the block ends."""
        settings = {"limits": dataclasses.asdict(self.limits), "level": self.level, "scratch": scratch}
        words = json.dumps(settings | {"fds": fds, "parent": os.getpid()})
        process = subprocess.Popen(
            [*_PYTHON, words],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=_ENVIRONMENT,
            start_new_session=True,
            pass_fds=fds,
        )
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(work).encode())
            yield process
        finally:
            self._end(process)
        if process.returncode == walls.NOT_SHUT:
            raise ReinError("reward code: the sandbox cannot be built any more; see `dmesg`, or start again")

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        killed = process.poll() is None
        if self.level == walls.LIMITS and killed:
            process.terminate()  # it sweeps what it started
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self.level == walls.LIMITS or killed:
            walls.end_session(process.pid)
        if process.stdout is not None:
            process.stdout.close()


@functools.cache
def best_level() -> str:
    """NAMESPACES where this kernel and user can have them, else LIMITS."""
    sandbox = Sandbox(Limits(), walls.NAMESPACES)
    try:
        with sandbox._folder() as scratch, sandbox._started({"role": "probe"}, scratch, []) as process:
            return walls.NAMESPACES if process.wait(30) == 0 else walls.LIMITS
    except (ReinError, OSError, subprocess.TimeoutExpired):
        return walls.LIMITS


def _remove(folder: str) -> None:
    """The folder and all in it, whatever permissions a program gave."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder):
        for root, folders, _ in os.walk(folder):
            for name in folders:
                with suppress(OSError):
                    os.chmod(os.path.join(root, name), 0o700)
        shutil.rmtree(folder, ignore_errors=True)
