"""A pool of Ray Data: `map_batches` over actors, each of which opens what it needs at its first piece.

Pieces and what is found of them travel pickled between the processes of one run; files never are. An error of
a worker comes back as itself. Ray Data replaces a worker that is lost and gives its piece to another.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from rein.errors import EngineError, RankLost
from rein.protocols import Found, Piece, Tell
from rein.runtime.cluster import FULL, joined, ray_module, refuse_more

RESTARTS = 3  # of each worker, and tries again of a piece, before the stage ends
NUMBER, WORK, FOUND, ERROR = "number", "work", "found", "error"  # columns of what travels
Make = Callable[[], Callable[[Piece, Tell], Found]]


class RayPool:
    """Implements protocols.Pool over workers of a Ray cluster."""

    def __init__(
        self,
        workers: int,
        *,
        cpus: float,
        gpus: float,
        address: str | None,
        again: bool = False,  # something was lost and may come back
    ) -> None:
        self.workers, self.cpus, self.gpus = workers, cpus, gpus
        self.address, self.again = address, again

    def map(
        self, make: Make[Piece, Found], pieces: Sequence[Piece], tell: Tell
    ) -> Generator[tuple[int, Found]]:
        """Raises what a worker raised; ConfigError where the cluster is too small, EngineError where workers
        do not start, RankLost where one is lost again and again, or its machine.
        """
        if not pieces:
            return
        with joined(self.address):
            bundles = [{"CPU": self.cpus, "GPU": self.gpus}] * self.workers
            refuse_more(bundles, again=self.again)
            with closing(self._found(make, pieces)) as rows:
                for row in rows:
                    if row[ERROR]:
                        raise pickle.loads(row[ERROR])
                    tell(len(pieces[row[NUMBER]]))
                    yield row[NUMBER], pickle.loads(row[FOUND])

    def _found(self, make: Make[Piece, Found], pieces: Sequence[Piece]) -> Generator[dict[str, Any]]:
        ray = ray_module()
        import ray.data as data

        _quieted(data)
        rows = [{NUMBER: i, WORK: pickle.dumps(piece)} for i, piece in enumerate(pieces)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # max_restarts has no name of its own there
            dataset = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Worker,
                fn_constructor_args=(pickle.dumps(make), os.getcwd()),
                compute=data.ActorPoolStrategy(
                    size=min(self.workers, len(rows)), max_tasks_in_flight_per_actor=1
                ),
                batch_size=1,
                batch_format="numpy",
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                max_restarts=RESTARTS,
                max_task_retries=RESTARTS,
            )
        try:
            yield from dataset.iter_rows()
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"runtime: ray: {self.workers} workers did not start within {FULL:.0f} s; wait for "
                "other work of the cluster to end, or ask for less"
            ) from error
        except ray.exceptions.RayError as error:
            raise RankLost(
                f"runtime: ray: a worker was lost {RESTARTS + 1} times, or its machine "
                f"({type(error).__name__}); what is done is kept, the same command goes on from there"
            ) from error


class _Worker:
    """One actor: makes at its first piece what all of its pieces need."""

    def __init__(self, make: bytes, folder: str) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
            sys.path.insert(0, folder)
        self.make = make
        self.work: Callable[[Any, Tell], Any] | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        found, error = b"", b""
        try:
            if self.work is None:
                self.work = pickle.loads(self.make)()
            found = pickle.dumps(self.work(pickle.loads(batch[WORK][0]), lambda steps: None))
        except Exception as raised:
            error = _pickled(raised)
        return {NUMBER: [int(batch[NUMBER][0])], FOUND: [found], ERROR: [error]}


def _pickled(error: Exception) -> bytes:
    """The error, or where it cannot travel what it says; --debug shows where it was raised."""
    where = traceback.format_exc()
    try:
        error.add_note(where)
        found = pickle.dumps(error)
        pickle.loads(found)
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note(where)
        return pickle.dumps(other)
    return found


def _quieted(data: Any) -> None:
    """Ray Data without bars and lines of its own."""
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.wait_for_min_actors_s = FULL
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
