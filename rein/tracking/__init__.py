"""Where metrics and words go. Knows nothing of models or data.

A tracker is opened with a Run. Packages are imported when they are used. What can be known to be missing
before any work (a package, a login, an address) is looked at by its `ready`.
"""

from collections.abc import Callable

from rein.protocols import Tracker
from rein.tracking import mlflow, swanlab, tensorboard, trackio, wandb
from rein.tracking.jsonl import JsonlTracker
from rein.tracking.run import METRICS, Run

Maker = Callable[[Run], Tracker]


def in_jsonl(run: Run) -> Tracker:
    """metrics.jsonl in the run's folder."""
    return JsonlTracker(run.folder / METRICS, run.from_number)


TRACKERS: dict[str, Maker] = {
    "jsonl": in_jsonl,
    "tensorboard": tensorboard.TensorBoard,
    "wandb": wandb.Wandb,
    "mlflow": mlflow.opened,
    "swanlab": swanlab.SwanLab,
    "trackio": trackio.opened,
}
READY: dict[str, Callable[[], None]] = {
    "tensorboard": tensorboard.ready,
    "wandb": wandb.ready,
    "mlflow": mlflow.ready,
    "swanlab": swanlab.ready,
    "trackio": trackio.ready,
}
