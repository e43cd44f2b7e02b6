"""Where the time of a run goes: seconds, CPU seconds of the process and work done, by phase.

`with clock("update_actor"): ...` names a phase. A moment belongs to the innermost one that is open, so phases
add up to the whole; what lies in none is OTHER's. Knows nothing of what is done in them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

OTHER = "other"


def _nothing() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass(slots=True)
class Spent:
    """What went by in each phase, and what was done in it."""

    seconds: defaultdict[str, float] = field(default_factory=_nothing)
    cpu: defaultdict[str, float] = field(default_factory=_nothing)
    work: defaultdict[str, float] = field(default_factory=_nothing)  # in the caller's unit

    def add(self, other: Spent) -> None:
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            for phase, value in theirs.items():
                mine[phase] += value

    def _parts(self) -> tuple[defaultdict[str, float], ...]:
        return self.seconds, self.cpu, self.work


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self.marks: Callable[[str], AbstractContextManager[Any]] = nullcontext  # entered for each phase
        self._before, self._lap = Spent(), Spent()
        self._open = [OTHER]
        self._seen = time.perf_counter(), time.process_time()

    @contextmanager
    def __call__(self, phase: str, work: float = 0.0) -> Iterator[None]:
        """Inside, time is this phase's; `work` counts where the block ends well."""
        self._charge()
        self._open.append(phase)
        try:
            with self.marks(phase):
                yield
            self._lap.work[phase] += work
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> Spent:
        """What went by since the last lap."""
        self._charge()
        lap, self._lap = self._lap, Spent()
        self._before.add(lap)
        return lap

    def whole(self) -> Spent:
        """What went by since the start; the lap goes on."""
        self._charge()
        found = Spent()
        found.add(self._before)
        found.add(self._lap)
        return found

    def _charge(self) -> None:
        now = time.perf_counter(), time.process_time()
        self._lap.seconds[self._open[-1]] += now[0] - self._seen[0]
        self._lap.cpu[self._open[-1]] += now[1] - self._seen[1]
        self._seen = now
