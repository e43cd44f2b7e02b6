"""Files of one JSON object per line that a run is still writing: each complete line once, by byte offset.

A half-written last line waits until it is whole. Where the file was cut, replaced or rotated (a resumed run
writes its metrics anew), everything is read again from the start.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rein.ui.folder import loads

CHUNK = 2**20  # bytes read at a time
LONGEST = 4 * 2**20  # bytes of a line; longer ones are passed over
REMEMBERED = 256  # bytes before the offset that must still be there
LARGEST = 2**53  # update number


class Tail:
    """Where reading stopped."""

    def __init__(self) -> None:
        self.offset, self._before, self._identity = 0, b"", (0, 0)

    def read(self, path: Path | None, anew: Callable[[], None]) -> Iterator[bytes]:
        """The lines that came since; `anew` is called first where all are given again."""
        if path is None:
            self._restart(anew)
            return
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not self._goes_on(file.fileno(), status):
                    self._restart(anew)
                self._identity = (status.st_dev, status.st_ino)
                file.seek(self.offset)
                yield from self._lines(file.read)
        except OSError:
            self._restart(anew)

    def _restart(self, anew: Callable[[], None]) -> None:
        self.offset, self._before, self._identity = 0, b"", (0, 0)
        anew()

    def _goes_on(self, handle: int, status: os.stat_result) -> bool:
        """Whether it is the same file, no shorter, with what was read last still in its place."""
        same = self._identity == (status.st_dev, status.st_ino) and status.st_size >= self.offset
        where = self.offset - len(self._before)
        return same and os.pread(handle, len(self._before), where) == self._before

    def _lines(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        rest, passed = b"", False  # passed: inside a line that is too long
        while chunk := read(CHUNK):
            whole, cut, rest_now = (rest + chunk).rpartition(b"\n")
            if cut:
                taken = whole + cut
                self.offset += len(taken)
                self._before = (self._before + taken)[-REMEMBERED:]
                lines = whole.split(b"\n")
                yield from (line for line in lines[passed:] if len(line) <= LONGEST)
                passed = False
            rest = rest_now
            if len(rest) > LONGEST:
                self.offset += len(rest)
                self._before, rest, passed = rest[-REMEMBERED:], b"", True


class Curves:
    """The lines of a metrics.jsonl that hold one of these metrics, with these alone."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.lines: list[dict[str, Any]] = []
        self.number: int | None = None  # of the last line
        self.times: tuple[float, float] | None = None  # of the first and last line kept
        self.bad = 0  # lines that are no metrics
        self._marks = [f'"{name}"'.encode() for name in sorted(self.names)]
        self._tail = Tail()

    def refresh(self, path: Path | None) -> None:
        newest = b""
        for text in self._tail.read(path, self._clear):
            if any(mark in text for mark in self._marks):
                self._take(text)
            newest = text or newest
        if newest and (line := _metrics(newest)) is not None:
            self.number = line["number"]

    def _clear(self) -> None:
        self.lines, self.number, self.times, self.bad = [], None, None, 0

    def _take(self, text: bytes) -> None:
        line = _metrics(text)
        if line is None:
            self.bad += 1
            return
        when = _number(line.get("time"))
        if when is not None and math.isfinite(when):
            self.times = (self.times[0] if self.times else when, when)
        kept = {name: _number(line[name]) for name in line if name in self.names}
        self.lines.append({"number": line["number"], **kept})


class Events:
    """The lines of a journal.jsonl."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self._tail = Tail()

    def refresh(self, path: Path | None) -> None:
        for text in self._tail.read(path, self.lines.clear):
            line = _object(text)
            known = (
                line is not None and isinstance(line.get("seq"), int) and isinstance(line.get("kind"), str)
            )
            if (
                line is not None
                and known
                and (line["kind"] != "resume" or isinstance(line.get("keeps"), int))
            ):
                self.lines.append(line)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _metrics(text: bytes) -> dict[str, Any] | None:
    line = _object(text)
    number = None if line is None else line.get("number")
    return line if isinstance(number, int) and abs(number) < LARGEST else None


def _number(value: Any) -> float | None:
    """A metric; NaN where it was none, so that the gap is counted."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None
