"""Crews: the workers of a Ray cluster that share models by FSDP2, and how a driver asks them.

The workers of a crew are ranks of one torch.distributed group; what all of them must make or do together is
asked of all at once and answered by the first. Made inside cluster.joined(); knows no models.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

from rein.errors import ConfigError, OutOfMemory, RankLost, ReinError
from rein.runtime import ranks as ranks_module
from rein.runtime.cluster import ray_module, reserved
from rein.runtime.launch import GRACE, is_of_ranks, meet
from rein.runtime.ranks import OWN, Made, Objects, Ranks
from rein.types import Experience

_current: list[Crews] = []


class Worker:
    """One rank, in a process of its own."""

    objects: Objects

    def enter(self, folder: str) -> tuple[str, int]:
        """Where a first rank here can be met: this machine's address and a port that is free now.

        Raises ConfigError where this machine does not see the driver's folder, in which a recipe's paths are.
        """
        import ray

        try:
            os.chdir(folder)
        except OSError as error:
            where = f"runtime: ray: {socket.gethostname()} does not see {folder} ({error.strerror})"
            raise ConfigError(f"{where}; all machines must see the same files") from error
        with socket.socket() as found:
            found.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(found.getsockname()[1])

    def join(self, rank: int, ranks: int, address: tuple[str, int]) -> None:
        """Meet the others."""
        meet(TCPStore(*address, ranks, is_master=rank == 0, wait_for_workers=False), rank, ranks)
        self.objects = Objects(Ranks())
        ranks_module.in_crew = True

    def make(self, *told: Any) -> None:
        name, make, of, options, *given = told
        self.objects.make(Made(name, make, of, tuple(given), options))

    def call(self, name: str, method: str, options: dict[str, Any], *given: Any) -> tuple[Any, float]:
        """What the first rank answers, and the seconds it took."""
        begin = time.perf_counter()
        found = self.objects.call(name, method, given, options)
        return (found if self.objects.rank == 0 else None), time.perf_counter() - begin


class Asked(NamedTuple):
    """What a crew is at."""

    what: str  # object and method
    promises: list[Any]  # one of each worker, the first one's first


class Crew:
    """So many workers; they do what they are asked in the order that it was asked."""

    def __init__(self, name: str, workers: Sequence[Any], shelf: Shelf) -> None:
        self.name, self.workers, self.shelf = name, list(workers), shelf
        self.busy: Counter[str] = Counter()  # seconds that the first worker was at work, by method
        self._loose: list[Asked] = []  # whose answers nobody waits for

    def enter(self, folder: str) -> list[Any]:
        return [worker.enter.remote(folder) for worker in self.workers]

    def meet(self, entered: list[Any]) -> None:
        """Become ranks of one group."""
        first, ranks = self._answer(entered), len(self.workers)
        self._answer([worker.join.remote(rank, ranks, first) for rank, worker in enumerate(self.workers)])

    def begin_making(self, told: Made) -> list[Any]:
        given = [self.shelf.placed(value) for value in told.given]
        words = told.name, told.make, told.of, told.options, *given
        return [worker.make.remote(*words) for worker in self.workers]

    def made(self, promises: list[Any]) -> None:
        """Wait for what was begun."""
        self._answer(promises)

    def begin(self, name: str, method: str, *given: Any, **options: Any) -> Asked:
        """Ask, and go on."""
        words = [self.shelf.placed(value) for value in given]
        promises = [worker.call.remote(name, method, options, *words) for worker in self.workers]
        return Asked(f"{name}.{method}", promises)

    def send(self, name: str, method: str, *given: Any, **options: Any) -> None:
        """Ask what has no answer."""
        self.leave(self.begin(name, method, *given, **options))

    def leave(self, asked: Asked) -> None:
        """Its answer is not wanted; a failure is raised by the next answer that is waited for."""
        self._loose.append(asked)

    def answer(self, asked: Asked) -> Any:
        """Wait for it. Raises what a worker raised, RankLost where one has ended."""
        while self._loose:
            self._timed(self._loose.pop(0))
        return self._timed(asked)

    def call(self, name: str, method: str, *given: Any, **options: Any) -> Any:
        return self.answer(self.begin(name, method, *given, **options))

    def _timed(self, asked: Asked) -> Any:
        found, seconds = self._answer(asked.promises)
        self.busy[asked.what] += seconds
        return found

    def _answer(self, promises: list[Any]) -> Any:
        ray = ray_module()
        left, end = list(promises), float("inf")
        first: Any = None
        odd: Exception | None = None  # what a rank says whose neighbour is gone
        while left and time.monotonic() < end:
            # In turns: a signal is heard between them.
            done, left = ray.wait(left, timeout=0.5)
            for answer in done:
                try:
                    found = ray.get(answer)
                    first = found if answer == promises[0] else first
                except ray.exceptions.RayTaskError as error:
                    cause = error.cause or error
                    if not is_of_ranks(cause):
                        raise cause from error
                    odd, end = cause, min(end, time.monotonic() + GRACE)
                except ray.exceptions.OutOfMemoryError as error:
                    raise OutOfMemory(
                        f"worker {promises.index(answer)}{self._whose}: ended for want of memory; lower the "
                        "token budget, or give workers more"
                    ) from error
                except _gone(ray) as error:
                    raise self._lost(promises.index(answer), error) from error
        if odd is not None:
            raise self._lost(None, odd) from odd
        return first

    def _lost(self, rank: int | None, error: Exception) -> ReinError:
        if "creation task" in str(error) or "ModuleNotFoundError" in str(error):
            what = str(error).strip().splitlines()[-1].strip()
            return ConfigError(
                f"runtime: ray: a worker cannot begin ({what}); every machine needs the same Python and rein"
            )
        who = "a worker" if rank is None else f"worker {rank}"
        return RankLost(
            f"{who}{self._whose} ended amid the run; the same command goes on from the newest snapshot, "
            "if any"
        )

    @property
    def _whose(self) -> str:
        return f" of the {self.name}" if self.name else ""


def _gone(ray: Any) -> tuple[type[Exception], ...]:
    """What Ray raises of a worker, a machine or an answer that is no more."""
    found = ray.exceptions
    return found.RayActorError, found.NodeDiedError, found.ObjectLostError, found.LocalRayletDiedError


class Shelf:
    """What is large, as workers are handed it: rows once for all, an experience once for all its updates."""

    def __init__(self) -> None:
        self._last: tuple[Experience, Any] | None = None

    def placed(self, value: Any) -> Any:
        if isinstance(value, list):  # of rows: once for all workers
            return ray_module().put(value)
        if not isinstance(value, Experience):
            return value
        if self._last is None or self._last[0] is not value:
            self._last = value, ray_module().put(value)
        return self._last[1]


class Crews:
    """The crews of a run, by role; one may have several roles."""

    def __init__(self, by_role: Mapping[str, Crew], ranks: int) -> None:
        self.by_role, self.ranks = dict(by_role), ranks

    @property
    def all(self) -> list[Crew]:
        return list(dict.fromkeys(self.by_role.values()))

    def of(self, role: str) -> Crew:
        """A role without a crew of its own is the first one's."""
        return self.by_role.get(role) or self.all[0]

    def roles_of(self, crew: Crew) -> list[str] | None:
        """The roles of a crew; None: all there are."""
        return [role for role, own in self.by_role.items() if own is crew] if len(self.all) > 1 else None


def current() -> Crews | None:
    """The crews that this process leads."""
    return _current[-1] if _current else None


def bundles(crews: int, nproc: int, nnodes: int, worker: Mapping[str, float]) -> list[Mapping[str, float]]:
    """What so many crews ask for: of each machine what its workers need."""
    return [{name: nproc * count for name, count in worker.items() if count}] * (nnodes * crews)


@contextmanager
def led(
    names: Sequence[str],  # a crew for each role; one of "" has all roles
    *,
    nproc: int,
    nnodes: int,
    worker: Mapping[str, float],  # what each asks for: {"CPU": 1.0}
    prepare: tuple[Callable[..., Any], Any],  # called on each with its rank's mesh and this
    again: bool = False,  # after one of them was lost
) -> Iterator[Crews]:
    """Inside, this process leads crews of nproc workers on each of nnodes machines; they end with it.

    Raises ConfigError at once where the cluster has less than is asked for, RankLost where a worker ended.
    """
    from ray.util import remove_placement_group

    ray = ray_module()
    placed = reserved(bundles(len(names), nproc, nnodes, worker), again=again)
    workers: list[Any] = []
    shelf = Shelf()
    try:
        crews = {}
        for i, name in enumerate(names):
            own = [
                _hired(ray, placed, i * nnodes + node, worker) for node in range(nnodes) for _ in range(nproc)
            ]
            workers += own
            crews[name] = Crew(name, own, shelf)
        entered = [(crew, crew.enter(os.getcwd())) for crew in crews.values()]
        for crew, asked in entered:
            crew.meet(asked)
            crew.made(crew.begin_making(Made("process", prepare[0], OWN, (prepare[1],), {})))
        found = Crews(crews, nproc * nnodes)
        _current.append(found)
        yield found
    finally:
        _current.clear()
        for end, thing in [*((ray.kill, one) for one in workers), (remove_placement_group, placed)]:
            with suppress(Exception):  # of a cluster that is gone
                end(thing)


def _hired(ray: Any, placed: Any, bundle: int, worker: Mapping[str, float]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
    options = {"num_cpus": worker["CPU"], "num_gpus": worker.get("GPU", 0.0), "scheduling_strategy": strategy}
    return ray.remote(Worker).options(**options).remote()
