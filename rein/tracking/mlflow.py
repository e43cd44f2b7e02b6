"""MLflow, by its client alone: no global run. MLFLOW_TRACKING_URI holds; without it MLflow takes ./mlflow.db.

A project is MLflow's experiment. A resumed run is the same run: points that the store has are not told again.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from rein.protocols import Tracker
from rein.tracking.run import Once, Run, flat, package
from rein.types import Metrics

MOST_PARAMS, LONGEST = 100, 500  # of one request; characters of a value that every server takes
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # not for minutes


def ready() -> None:
    """Reach the store once: a wrong address is said before any work."""
    _client().search_experiments(max_results=1)


def opened(run: Run) -> Tracker:
    client = _client()
    known_as = run.id_of("mlflow")
    if known_as is None:
        known_as = _begin(client, run)
        run.keep_id("mlflow", known_as)
        points: set[tuple[str, int]] = set()
    else:
        found = client.get_run(known_as)
        client.update_run(known_as, status="RUNNING")
        points = {
            (name, point.step)
            for name in found.data.metrics
            for point in client.get_metric_history(known_as, name)
        }
    return Once(Mlflow(client, known_as), run, lambda name, number: (cleaned(name), number) in points)


class Mlflow:
    """Implements protocols.Tracker on one run; a call returns when the store has the metrics."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id
        self._metric = package("mlflow.entities", "mlflow").Metric

    def log(self, metrics: Metrics, number: int) -> None:
        now = int(time.time() * 1000)
        points = [self._metric(cleaned(name), float(value), now, number) for name, value in metrics.items()]
        if points:
            self._client.log_batch(self._id, metrics=points)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def cleaned(name: str) -> str:
    """A metric's name as MLflow takes it, as verl cleans it."""
    return re.sub(r"[^/\w.\- :]", "_", re.sub(r"/+", "/", name.replace("@", "_at_")))


def _client() -> Any:
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    return package("mlflow", "mlflow").MlflowClient()


def _begin(client: Any, run: Run) -> str:
    experiment = client.get_experiment_by_name(run.project)
    place = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
    known_as = str(client.create_run(place, run_name=run.name).info.run_id)
    make = package("mlflow.entities", "mlflow").Param
    params = [make(cleaned(key), str(value)[:LONGEST]) for key, value in flat(run.settings).items()]
    for begin in range(0, len(params), MOST_PARAMS):
        client.log_batch(known_as, params=params[begin : begin + MOST_PARAMS])
    return known_as
