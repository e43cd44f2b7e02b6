"""TensorBoard: event files in the run's folder, or in $TENSORBOARD_DIR/PROJECT/NAME.

A resumed run writes its curves anew from metrics.jsonl, with the times of then, and tells readers to forget
what earlier files say: no step is there twice, and what a killed process had not written is there. One that
goes on from where the last was closed, as the next round does, only appends.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rein.tracking.run import Run, package
from rein.types import Metrics


def ready() -> None:
    package("tensorboard", "tensorboard")
    package("torch.utils.tensorboard", "tensorboard")


class TensorBoard:
    """Implements protocols.Tracker. Each update is on disk at once."""

    def __init__(self, run: Run) -> None:
        ready()
        shared = os.environ.get("TENSORBOARD_DIR")
        folder = Path(shared) / run.project / run.name if shared else run.folder / "tensorboard"
        appends = run.id_of("tensorboard") == str(run.from_number)
        run.keep_id("tensorboard", "open")
        self._run, self._last = run, run.from_number
        # purge_step 0: readers drop the events of earlier files from step 0 on.
        self._writer: Any = package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(folder), purge_step=None if appends else 0
        )
        for number, when, metrics in () if appends else run.kept():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, number, walltime=when)

    def log(self, metrics: Metrics, number: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
        self._last = number

    def close(self) -> None:
        self._writer.close()
        self._run.keep_id("tensorboard", str(self._last))  # all up to it is there, and nothing beyond
