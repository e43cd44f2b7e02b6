"""TensorBoard: event files in the run's folder, or in $TENSORBOARD_DIR/PROJECT/NAME.

A resumed run writes its curves anew from metrics.jsonl, with the times of then, and tells readers to forget
what earlier files say: no step is there twice, and what a killed process had not written is there.
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
        # purge_step 0: readers drop the events of earlier files from step 0 on.
        self._writer: Any = package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(folder), purge_step=0
        )
        for number, when, metrics in run.kept():
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, number, walltime=when)

    def log(self, metrics: Metrics, number: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
