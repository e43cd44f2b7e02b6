"""The lower end of a terminal, drawn anew a few times a second while lines go by above it.

The cursor rests at the top of what is drawn, on an empty line. So whatever else writes to the terminal, a
subprocess, a library in C, another rank, comes above it and pushes it down, and is not drawn over; and a
window that changes its size needs no count of lines: what is below the cursor is erased. (rich.live rests at
the end, and erases what others wrote there.) The cursor is never hidden, so nothing is left to restore.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

EVERY_S, IDLE_S = 0.25, 1.0  # between drawings; where nothing has changed but the clock
MOST_SHARE = 0.003  # of the time that drawing may take: where it is slow, it is done less often
LINE_END, BELOW, UP = "\x1b[K", "\x1b[J", "\x1b[{}A"  # erase to the end of line, of screen; cursor up
CUT, WRAP = "\x1b[?7l", "\x1b[?7h"  # long lines: they are cut where the window has just become narrower


class Live:
    """Draws `lines(width, height)` on standard output, which is a terminal, from start() to stop().

    An error in drawing ends it, and `failed` is told of it once. No method raises for the terminal's sake.
    """

    def __init__(self, lines: Callable[[int, int], list[str]], failed: Callable[[Exception], None]) -> None:
        self._lines, self._failed = lines, failed
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._drawn, self._last, self._touched = "", 0.0, False
        self._streams: dict[str, _Above] = {}
        self._out = sys.stdout
        self._ticker = threading.Thread(target=self._tick, name="live", daemon=True)

    def start(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                self._streams[name] = _Above(self, stream)
                setattr(sys, name, self._streams[name])
        self.draw()
        self._ticker.start()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def touch(self) -> None:
        """Something has changed."""
        self._touched = True

    def say(self, text: str) -> None:
        """A line above what is drawn, which stays."""
        with self._lock:
            if self._over.is_set() or not self._in_front():
                self._write(f"{text}\n")
            else:
                self._write(f"\r{BELOW}{text}\n{self._drawn}")

    def draw(self) -> None:
        with self._lock:
            self._touched, self._last, self._drawn = False, time.monotonic(), ""
            if self._over.is_set() or not self._in_front():
                return
            try:
                lines = self._lines(*self._size())
                body = "".join(f"\n{line}{LINE_END}" for line in lines)
                self._drawn = f"{CUT}\r{LINE_END}{body}{BELOW}{UP.format(len(lines))}\r{WRAP}"
            except Exception as error:  # of whatever kind: the run matters more
                self._write(f"\r{BELOW}")
                self._give_up(error)
            self._write(self._drawn)

    def stop(self) -> None:
        """Leave the last state in the terminal, the cursor below it."""
        self.draw()
        with self._lock:
            if self._drawn:
                self._write("\n" * (self._drawn.count("\n") + 1))
            self._end()
        if self._ticker.is_alive() and self._ticker is not threading.current_thread():
            self._ticker.join()

    def _give_up(self, error: Exception) -> None:
        if not self._over.is_set():
            self._drawn = ""
            self._end()
            self._failed(error)

    def _end(self) -> None:
        """Give the streams back."""
        self._over.set()
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.rich_proxied_file)
        for stream in self._streams.values():
            stream.finish()

    def _tick(self) -> None:
        pause = EVERY_S
        while not self._over.wait(pause):
            if self._touched or time.monotonic() - self._last >= IDLE_S:
                began = time.thread_time()
                self.draw()
                pause = max(EVERY_S, (time.thread_time() - began) / MOST_SHARE)

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "utf-8"
        try:
            self._out.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._out.flush()
        except (OSError, ValueError) as error:  # the terminal is gone
            self._give_up(error)

    def _size(self) -> tuple[int, int]:
        width, height = os.get_terminal_size(self._out.fileno())
        return width or 80, height or 24

    def _in_front(self) -> bool:
        """Not in the background of a shell, whose line it would draw over."""
        try:
            return os.tcgetpgrp(self._out.fileno()) == os.getpgrp()
        except (OSError, ValueError):  # not the terminal of this session: there is no shell
            return True


class _Above:
    """Stands for a stream: whole lines that are written to it are said above what is drawn."""

    def __init__(self, live: Live, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # by this name rich finds it, and so writes to it
        self._live, self._left, self._owner = live, "", os.getpid()

    def write(self, text: str) -> int:
        if self._live.over or os.getpid() != self._owner:  # or in a fork, whose lock may never open
            return self.rich_proxied_file.write(text)
        *lines, left = (self._left + text).split("\n")
        self._left = left[left.rstrip("\r").rfind("\r") + 1 :]  # a bar that rewrites its line
        for line in lines:
            self._live.say(line.rstrip("\r").rpartition("\r")[2])
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Half a line waits for its end."""

    def finish(self) -> None:
        if self._left:
            self._live.say(self._left)
            self._left = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
