"""A real pseudo-terminal and what is on its screen, by pyte."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import TextIO

import pyte


def resize(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Screen:
    """`fd`, the terminal's own end, is drained into a screen by a thread."""

    def __init__(self, fd: int, columns: int = 80, rows: int = 24) -> None:
        self.fd, self.raw = fd, b""
        resize(fd, columns, rows)
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream, self._lock = pyte.ByteStream(self._screen), threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self.fd, 65536)
            except OSError:  # the other end is closed
                return
            if not some:
                return
            with self._lock:
                self.raw += some
                self._stream.feed(some)

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self._screen.resize(rows, columns)
        resize(self.fd, columns, rows)

    @property
    def lines(self) -> list[str]:
        """All that has gone by and what is there, without the spaces at ends."""
        with self._lock:
            width = self._screen.columns
            past = ["".join(line[x].data for x in range(width)) for line in self._screen.history.top]
            found = [line.rstrip() for line in (*past, *self._screen.display)]
        while found and not found[-1]:
            found.pop()
        return found

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def cursor(self) -> tuple[int, bool]:
        """Its line among `lines`, and whether it is shown."""
        with self._lock:
            return len(self._screen.history.top) + self._screen.cursor.y, not self._screen.cursor.hidden

    def until(self, found: Callable[[str], object], seconds: float = 10.0) -> str:
        """The text, once it is as wanted."""
        end = time.monotonic() + seconds
        while not found(text := self.text):
            assert time.monotonic() < end, text
            time.sleep(0.02)
        return text

    def join(self) -> None:
        """To the end of what the other end wrote before it closed."""
        self._reader.join(10)


def opened(columns: int = 80, rows: int = 24, encoding: str = "utf-8") -> tuple[Screen, TextIO]:
    """A screen, and the file that writes to it."""
    ours, theirs = pty.openpty()
    return Screen(ours, columns, rows), open(theirs, "w", encoding=encoding, errors="strict")


BEGIN = """import fcntl, os, sys, termios
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""


def in_terminal(
    words: list[str], columns: int = 80, rows: int = 24
) -> tuple[Screen, subprocess.Popen[bytes]]:
    """A process that has the screen as the terminal that it is controlled from, as a shell's have."""
    ours, theirs = pty.openpty()
    screen = Screen(ours, columns, rows)
    env = {name: text for name, text in os.environ.items() if name not in ("CI", "NO_COLOR")}
    env |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *words], env=env, start_new_session=True,
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    return screen, process
