"""Words and progress for the person at the terminal: rich in a terminal, plain lines when piped.

Progress shows an ETA. Plain lines come at most every ten seconds. Knows nothing of what the work is.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 10.0


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "") -> None: ...


class Console:
    """Says lines and shows progress bars. `quiet` says nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._rich = RichConsole(stderr=False, highlight=False, soft_wrap=True)
        self._live = self._rich.is_terminal and not quiet

    def say(self, text: str) -> None:
        """One line, as it is: markup in user text is not interpreted."""
        if not self.quiet:
            self._rich.print(text, markup=False)

    @contextmanager
    def progress(self, total: int, what: str) -> Iterator[Advance]:
        """A bar named `what` over `total` steps: `with console.progress(n, "sft") as advance: advance(1,
        "loss 0.3")`.
        """
        if self._live:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            with Progress(*columns, console=self._rich) as bar:
                task = bar.add_task(what, total=total, note="")
                yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)
            return
        yield _PlainProgress(total, what, silent=self.quiet)


class _PlainProgress:
    def __init__(self, total: int, what: str, *, silent: bool) -> None:
        self.total, self.what, self.silent = total, what, silent
        self.done = 0
        self.started = self.printed = time.monotonic()

    def __call__(self, steps: int = 1, note: str = "") -> None:
        self.done += steps
        now = time.monotonic()
        if self.silent or (now - self.printed < PLAIN_EVERY_S and self.done < self.total):
            return
        self.printed = now
        elapsed = now - self.started
        eta = elapsed / max(self.done, 1) * (self.total - self.done)
        sys.stdout.write(
            f"{self.what} {self.done}/{self.total} {elapsed:.0f}s eta {eta:.0f}s {note}".rstrip() + "\n"
        )
        sys.stdout.flush()
