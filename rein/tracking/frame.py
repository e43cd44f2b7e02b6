"""The live part of a terminal as lines of text: bars, curves and what is pinned, cut to a width and a height.

Plain strings with the eight colors of every terminal; nothing here writes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, set_cell_size

from rein.tracking.curves import ASCII, BLOCKS, MARK, Curve, Curves

BOLD, DIM, CYAN, YELLOW, RED = "1", "2", "36", "33", "31"
Part = tuple[str, str]  # text, and its color or ""
RECENT, APART = 64, 0.01  # marks that the pace is of, and the share of the time between two: about half of it
ROOMY, WIDE = 56, 95  # columns from which names are whole, and lowest and highest are told


@dataclass(frozen=True)
class Look:
    """What the terminal can show."""

    width: int
    height: int
    blocks: bool = True  # else ASCII
    color: bool = True


@dataclass
class Bar:
    """How far something is: `done` of `total` steps, and the pace of late."""

    total: int
    what: str
    done: int = 0
    note: str = ""
    pace: float = 0.0  # seconds a step
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._made, self._marks = 0, deque([(self.began, 0)], maxlen=RECENT)
        self.printed = self.began  # when it was last told in a plain line

    def advance(self, steps: int, note: str, total: int | None) -> None:
        """Fewer than 0 steps are undone; they tell nothing of the pace."""
        self.done, self.note, now = self.done + steps, note, time.monotonic()
        self.total = self.total if total is None else total
        if steps > 0:
            self._made += steps
            at, made = self._marks[0]
            self.pace = (now - at) / (self._made - made)
            if now - self._marks[-1][0] > APART * (now - self.began):
                self._marks.append((now, self._made))

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds to go at this pace."""
        return self.pace * max(self.total - self.done, 0)


def lines(bars: Sequence[Bar], curves: Curves | None, pinned: str, look: Look) -> list[str]:
    """The whole live part; where it is too high the bars stay."""
    width = max(look.width - 1, 8)  # the last column is left free: writing there wraps on some terminals
    watched = list(curves.shown()) if curves else []
    found = [_bar(bar, width, look, noted=not watched) for bar in bars]
    if curves:
        found += [_curve(name, curve, curves, width, look) for name, curve in watched]
        if curves.undone:
            times = "once" if len(curves.undone) == 1 else f"{len(curves.undone)} times"
            found.append([(f"rolled back {times}, last to update {curves.undone[-1][0]}", RED)])
    if pinned:
        found.append([(pinned, YELLOW)])
    return [_painted(parts, width, look) for parts in found[: max(look.height - 2, 1)]]


def _bar(bar: Bar, width: int, look: Look, *, noted: bool) -> list[Part]:
    """What matters most stays where there is no room: name, count, time to go."""
    count, eta = f" {bar.done}/{bar.total}", f"  eta {clock(bar.left) if bar.pace else '?'}"
    share = min(max(bar.done / bar.total, 0.0), 1.0) if bar.total else 1.0
    extra = [f"  {bar.note}"] if noted and bar.note else []
    extra += [f" {100 * share:3.0f} %", f"  {clock(bar.elapsed)}"]
    if bar.pace:
        extra.append(f"  {1 / bar.pace:,.1f}/s" if bar.pace <= 1 else f"  {bar.pace:,.1f} s each")
    room, told = width - cell_len(bar.what) - len(count) - len(eta) - 1, ""
    for text in extra:
        if room - cell_len(told + text) >= 12:
            told += text
    size = min(room - cell_len(told), 40)
    full, empty = ("━", "─") if look.blocks else ("#", ".")
    done = int(share * size)
    drawn = [(" ", ""), (full * done, CYAN), (empty * (size - done), DIM)] if size >= 4 else []
    return [(bar.what, BOLD), *drawn, (count, ""), (told, ""), (eta, "")]


def _curve(name: str, curve: Curve, curves: Curves, width: int, look: Look) -> list[Part]:
    name = f"{name:<24}" if width >= ROOMY else f"{name.rpartition('/')[2]:<16}"
    value = f"{curve.latest:>10.4g}" if width >= ROOMY else f"{curve.latest:>8.3g}"
    values = [value for _, value in curve.points] if width >= WIDE else []
    ends = f"  {min(values):.3g} to {max(values):.3g}" if values else ""
    room = max(width - len(name) - len(value) - (24 if width >= WIDE else 0) - 2, 4)
    drawn = curves.line(curve, room, blocks=BLOCKS if look.blocks else ASCII)
    parts = [(run, RED if run[0] == MARK else CYAN) for run in _runs(drawn)]
    return [(name, ""), (value, BOLD), ("  ", ""), *parts, (ends, DIM)]


def _runs(drawn: str) -> list[str]:
    """The line cut where marks begin and end."""
    found: list[str] = []
    for column in drawn:
        if found and (found[-1][0] == MARK) == (column == MARK):
            found[-1] += column
        else:
            found.append(column)
    return found


def _painted(parts: Sequence[Part], width: int, look: Look) -> str:
    found, left = "", width
    for text, color in parts:
        size = cell_len(text)
        cut = text if size <= left else set_cell_size(text, left)
        left -= min(size, left)
        found += f"\x1b[{color}m{cut}\x1b[0m" if cut and color and look.color else cut
    return found


def clock(seconds: float) -> str:
    """3:05, 2:03:05, 4d 02:03:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
