"""Words and progress for the person at the terminal: a live view in a terminal, plain lines elsewhere.

The live view has progress with an ETA, and the curves of metrics that it gets as the tracker `console` does.
Plain lines, where output is piped, in CI (CI is set) and with TERM=dumb, come at most every ten seconds.
Knows nothing of what the work is.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rein.protocols import Tracker
from rein.tracking.curves import BLOCKS, Curves
from rein.tracking.frame import Bar, Look, lines
from rein.tracking.live import Live
from rein.tracking.run import Run

PLAIN_EVERY_S = 10.0
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what would move a cursor or color a terminal


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "", total: int | None = None) -> None: ...


class Console:
    """Says lines and shows progress. `quiet` says nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bars: list[Bar] = []
        self._curves, self._pinned = Curves(), ""
        self._live: Live | None = None
        self._draws = True  # until it has failed

    def say(self, text: str) -> None:
        """One line, as it is: markup in it is not interpreted, control characters are shown."""
        if self.quiet:
            return
        text, live = printable(text), self._live
        if live is not None:
            live.say(text)
        else:
            print(text, flush=True)

    def pin(self, text: str) -> None:
        """What holds until something else is pinned, or the progress ends: shown in the live view alone."""
        self._pinned = printable(text)

    def watch(self, run: Run) -> Tracker:
        """The tracker `console`: what it is told is drawn. A resumed run's history comes from its file."""
        self._curves = Curves()
        if self._drawable():
            for number, _, metrics in run.kept():
                self._curves.log(metrics, number)
        return self._curves

    @contextmanager
    def progress(self, total: int, what: str, done: int = 0) -> Iterator[Advance]:
        """A bar named `what` over `total` steps: `with console.progress(n, "sft") as advance: advance(1,
        "loss 0.3")`. `done`: before this process; `advance` may tell another total.
        """
        bar = Bar(total, printable(what), done)
        self._bars.append(bar)
        if self._live is None and self._drawable():
            self._live = Live(self._lines, self._fail)
            self._live.start()
        try:
            yield partial(self._advance, bar)
        finally:
            live = self._live
            if live is not None and len(self._bars) == 1:
                live.stop()
                self._live = None
            self._bars.remove(bar)
            if not self._bars:
                self._pinned = ""

    def _advance(self, bar: Bar, steps: int = 1, note: str = "", total: int | None = None) -> None:
        bar.advance(steps, printable(note), total)
        now, live = time.monotonic(), self._live
        if live is not None:
            live.touch()
        elif not self.quiet and (now - bar.printed >= PLAIN_EVERY_S or bar.done >= bar.total):
            bar.printed = now
            told = f"{bar.what} {bar.done}/{bar.total} {bar.elapsed:.0f}s eta {bar.left:.0f}s {bar.note}"
            print(told.rstrip(), flush=True)

    def _drawable(self) -> bool:
        """Whether standard output is a terminal where a person may watch."""
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown") or sys.platform == "win32"
        return self._draws and not self.quiet and not dumb and not os.environ.get("CI") and _is_terminal()

    def _lines(self, width: int, height: int) -> list[str]:
        color = not os.environ.get("NO_COLOR")
        look = Look(width, height, blocks=_shows(BLOCKS + "━─"), color=color)
        return lines(self._bars, None if self._curves.closed else self._curves, self._pinned, look)

    def _fail(self, error: Exception) -> None:
        """Plain lines from here on."""
        self._draws, self._live = False, None
        try:
            self.say(f"warning: the live view: {type(error).__name__} ({error}); plain lines from here on")
        except (OSError, ValueError):  # a terminal that is gone is no reason to end a run, whose files go on
            self.quiet = True


def printable(text: str) -> str:
    """As standard output can show it: the rest is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except ValueError:  # closed
        return False


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
