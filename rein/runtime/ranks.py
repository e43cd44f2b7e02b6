"""The mesh of many processes, and how one of them leads.

Rank 0 runs the stage; the others `follow` it: what all must have or do together is told to them, an object by
its name, the function that makes it and its arguments, a call by object and method, and every rank makes or
does it at once. Messages are pickled between the processes of one run, as torch.distributed does; files never
are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rein.types import Experience

OWN = "ranks"  # the name of the mesh itself among a rank's objects


class Made(NamedTuple):
    """Told: make an object, `make(of, *given, **options)`, and keep it by its name."""

    name: str
    make: Callable[..., Any]
    of: str  # the name of its first argument
    given: tuple[Any, ...]
    options: dict[str, Any]


class Called(NamedTuple):
    """Told: call a method of an object."""

    name: str
    method: str
    given: tuple[Any, ...]
    options: dict[str, Any]


class Known(NamedTuple):
    """In the place of an experience that was told before and is the last one that was."""


in_crew = False  # whether this process is a worker of a crew


def started() -> bool:
    """Whether this process is one of several ranks, or a worker, alone or not."""
    return dist.is_initialized() and (dist.get_world_size() > 1 or in_crew)


class Group:
    """Implements protocols.Mesh over torch.distributed; None: of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self.add(torch.tensor(list(values), dtype=torch.float64)).tolist()

    def add(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def exchange(self, parts: Tensor) -> Tensor:
        """[ranks, ...]: the ith goes to the ith rank, whose own comes in its place."""
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=self.group)
        return found


class Ranks(Group):
    """All ranks of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Experience | None = None

    def cut_in(self, size: int) -> tuple[Group, Group]:
        """Groups of `size` ranks beside each other: the ranks at this one's place in each, and its group."""
        shape = self.world_size // size, size
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("across", "within"))
        return Group(mesh.get_group("across")), Group(mesh.get_group("within"))

    def gathered(self, value: Any) -> list[Any]:
        """What every rank has, by rank, on all of them."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    # leading

    def tell(self, what: Made | Called | None) -> None:
        """From rank 0 to the others: what to make or do next, or that there is nothing more."""
        dist.broadcast_object_list([what], src=0)

    def brief(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as they are told: an experience once, however many updates are made of it."""
        found = []
        for value in given:
            same = isinstance(value, Experience) and value is self.told
            if isinstance(value, Experience):
                self.told = value
            found.append(Known() if same else value)
        return tuple(found)

    # following

    def follow(self) -> None:
        """Make and do what rank 0 tells of, until there is nothing more."""
        objects = Objects(self)
        while True:
            heard: list[Made | Called | None] = [None]
            dist.broadcast_object_list(heard, src=0)
            match heard[0]:
                case None:
                    return
                case Made() as told:
                    self.told = None if told.of == OWN else self.told
                    objects.make(told)
                case Called(name, method, given, options):
                    objects.call(name, method, self._whole(given), options)

    def _whole(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as they were meant."""
        for value in given:
            self.told = value if isinstance(value, Experience) else self.told
        return tuple(self.told if isinstance(value, Known) else value for value in given)


class Objects:
    """What a rank was told to make, by name.

    What is made of the ranks themselves begins a stage: what the one before had is dropped.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank, self._ranks = ranks.rank, ranks
        self._all: dict[str, Any] = {OWN: ranks}

    def make(self, told: Made) -> None:
        if told.of == OWN:
            self._all = {OWN: self._ranks}
            gc.collect()
        self._all[told.name] = told.make(self._all[told.of], *told.given, **told.options)

    def call(self, name: str, method: str, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return getattr(self._all[name], method)(*given, **options)


class Led:
    """An object that every rank has: some of its methods are called on all at once, the rest here alone."""

    def __init__(self, ranks: Ranks, name: str, own: Any, together: Sequence[str]) -> None:
        self._ranks, self._name, self._own, self._together = ranks, name, own, frozenset(together)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._own, attribute)
        return self._all(attribute, found) if attribute in self._together else found

    def _all(self, method: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            quiet = {name: value for name, value in options.items() if name != "advance"}  # one bar, here
            self._ranks.tell(Called(self._name, method, self._ranks.brief(given), quiet))
            return own(*given, **options)

        return call
