"""Trackio: a SQLite file under TRACKIO_DIR, or the server or Space that its variables name.

A resumed run is the same run, known by its name: points that the file has are not told again.
"""

from __future__ import annotations

from typing import Any

from rein.protocols import Tracker
from rein.tracking.run import Once, Run, package
from rein.types import Metrics


def ready() -> None:
    package("trackio", "trackio")


def opened(run: Run) -> Tracker:
    trackio = package("trackio", "trackio")
    known_as = run.id_of("trackio")
    opened = trackio.init(
        project=run.project,
        name=known_as or run.name,
        resume="never" if known_as is None else "allow",
        config=dict(run.settings),
        embed=False,
    )
    run.keep_id("trackio", opened.name)
    points = set() if known_as is None else _points(run.project, known_as)
    return Once(Trackio(opened), run, lambda name, number: (name, number) in points)


def _points(project: str, name: str) -> set[tuple[str, int]]:
    """(metric, step) of all that the local file has; none where metrics go to a server."""
    store = package("trackio.sqlite_storage", "trackio").SQLiteStorage
    return {(key, line["step"]) for line in store.get_logs(project, name) for key in line}


class Trackio:
    """Implements protocols.Tracker on one run; trackio writes twice a second, in a thread of its own."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Metrics, number: int) -> None:
        self._run.log(dict(metrics), step=number)

    def close(self) -> None:
        self._run.finish()
