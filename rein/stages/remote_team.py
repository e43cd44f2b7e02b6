"""What a driver has in the place of a team: the crews of a Ray cluster hold the models. Part of team.py.

Each worker has a Team of its own roles; what is made of a team is made by every worker, and called from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from rein.config.recipe import Recipe
from rein.learner import RemoteLearner
from rein.models.reference import Reference
from rein.runtime.crews import Crew, Crews
from rein.runtime.memory import free_models
from rein.runtime.ranks import OWN, Made
from rein.runtime.single import SingleMesh
from rein.snapshots import RunState, Shard, write_shard
from rein.stages.team import KEPT, Files, Reopen, Team, join
from rein.types import Trajectory

T = TypeVar("T")


class RemoteMesh(SingleMesh):
    """Of the driver: it has no part of a model, the workers are so many."""

    def __init__(self, ranks: int) -> None:
        self.world_size = ranks


class RemoteTeam(Team):
    """The crews that hold the models of a stage, by their roles."""

    def __init__(
        self,
        recipe: Recipe,
        crews: Crews,
        models: Mapping[str, Any],
        reopen: Reopen,
        reference: Reference | None,
    ) -> None:
        super().__init__(recipe, RemoteMesh(crews.ranks), models, reference)
        self.crews = crews
        for model in [*models.values(), *([reference.actor] if reference else [])]:
            model.model.to("meta")  # its sizes are looked at, its weights are the workers'
        free_models()
        refers = reference is not None
        self._make(
            crews.all,
            lambda c: Made("team", join, OWN, (recipe, reopen, refers, crews.roles_of(c), c.name), {}),
        )

    def _make(self, crews: Sequence[Crew], told: Callable[[Crew], Made]) -> None:
        """On all at once."""
        begun = [(crew, crew.begin_making(told(crew))) for crew in crews]
        for crew, promises in begun:
            crew.made(promises)

    def made(self, name: str, make: Callable[..., T], *given: Any, **options: Any) -> T:
        """What stands for it here, made by every worker that has the models for it."""
        crews = self.crews.all if name in ("learner", "passes", "files") else [self.crews.of("actor")]
        self._make(crews, lambda _: Made(name, make, "team", given, options))
        if name == "learner":
            kept = ("kl_coef_in_loss", "kl_coef_in_reward", "longest_group")
            roles = [role for role in ("critic", "actor") if role in self.models]
            own = {key: options[key] for key in kept}
            self.learner = RemoteLearner(self.recipe, self.crews, roles, **own)
            return cast(T, self.learner)
        if name == "passes":
            return cast(T, RemotePasses(self.crews))
        found = Remote(self.crews.of("actor"), name)
        if name == "pupil":
            self.learner = found
        return cast(T, found)

    @property
    def files(self) -> Files:
        """The same for the whole stage."""
        if self._files is None:
            self.made("files", Files)
            self._files = cast(Files, RemoteFiles(self.crews))
        return self._files

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """No tensors: every worker writes its own."""
        return {}, self.learner.meta()

    def busy(self) -> dict[str, dict[str, float]]:
        """Seconds that the first worker of each crew was at work, by what it did."""
        return {
            crew.name or "all": {what: round(seconds, 3) for what, seconds in crew.busy.items()}
            for crew in self.crews.all
        }

    def write(self, draft: Path, tensors: Mapping[str, Any]) -> list[Shard]:
        """The tensors of a snapshot: each worker its part, this process the batch's."""
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith(KEPT)}
        _ = self.files
        shards = [shard for own in self._all("write", draft) for shard in own]
        return [*shards, write_shard(draft, "experience.safetensors", kept)] if kept else shards

    def restore(self, state: RunState, key: str) -> None:
        """Put a learner's state back on every worker."""
        assert state.folder is not None
        _ = self.files
        if isinstance(self.learner, RemoteLearner):
            self.learner.drop()
        self._all("restore", state.folder, key)
        if isinstance(self.learner, RemoteLearner):
            self.learner.take(state.meta[key])

    def _all(self, method: str, *given: Any) -> list[Any]:
        """What the files of every crew answer. Raises the first error once all are done."""
        begun = [(crew, crew.begin("files", method, *given)) for crew in self.crews.all]
        found, errors = list[Any](), list[Exception]()
        for crew, asked in begun:
            try:
                found.append(crew.answer(asked))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return found


class Remote:
    """An object that all workers of a crew have: its methods are called on all, the first one answers."""

    def __init__(self, crew: Crew, name: str) -> None:
        self._crew, self._name = crew, name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*given: Any, **options: Any) -> Any:
            advance = options.pop("advance", None)
            found = self._crew.call(self._name, method, *given, **options)
            if advance is not None:
                advance(len(given[0]))
            return found

        return call


class RemotePasses:
    """What models on workers say of rows; as experience.Passes."""

    def __init__(self, crews: Crews) -> None:
        self.crews = crews

    def log_probs(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """log pi(token | before) of the actor."""
        return self._of("actor", "log_probs", rows, budget)

    def exact_kl(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """KL(actor || reference) over the vocabulary."""
        return self._of("actor", "exact_kl", rows, budget)

    def values(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """V of the critic."""
        return self._of("critic", "values", rows, budget)

    def _of(self, role: str, method: str, rows: Sequence[Trajectory], budget: int) -> Tensor:
        return cast(Tensor, self.crews.of(role).call("passes", method, rows, budget))


class RemoteFiles:
    """Model folders, written by the workers that hold the role."""

    def __init__(self, crews: Crews) -> None:
        self.crews = crews

    def save(self, role: str, path: Path) -> None:
        """A role's Hugging Face folder."""
        self.crews.of(role).call("files", "save", role, path)
