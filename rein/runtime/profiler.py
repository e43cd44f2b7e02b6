"""Traces of chosen steps: what torch did in each, with the clock's phases as named ranges.

A trace is JSON for chrome://tracing or Perfetto. On a GPU phases are NVTX ranges too, for Nsight Systems.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class Profiler:
    """`step(n)` says that step n begins; `close()` that none follows."""

    def __init__(self, steps: Collection[int], folder: Path) -> None:
        self.steps, self.folder = frozenset(steps), folder
        self._running: tuple[int, profile] | None = None

    def step(self, number: int) -> None:
        """End the trace of the step before, and begin this one's if it is asked for."""
        self.close()
        if number in self.steps:
            kinds = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(ProfilerActivity.CUDA)
            self._running = number, profile(activities=kinds)
            self._running[1].start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named range of the trace; nothing outside one."""
        if self._running is None:
            yield
            return
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            with record_function(name):
                yield
        finally:
            if cuda:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Write the trace that runs, to <folder>/step-<n>.json. Raises OSError where it cannot be written."""
        if self._running is not None:
            number, trace = self._running
            self._running = None
            trace.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.folder / f"step-{number}.json"))
