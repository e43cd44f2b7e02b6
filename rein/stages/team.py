"""What a stage trains, and the ranks that share it: this process alone, or those that it leads. Not a verb.

What needs the models (learner, passes, probe, engine, files) is made by functions of a team, so that every
rank makes the same; on the leading rank, calls that all must make together are told to the others. Workers of
a Ray cluster have a Team each; what their driver has in its place is in remote_team.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.engines.ranks import RankEngine
from rein.errors import ConfigError
from rein.experience import Passes
from rein.learner import Learner
from rein.models.actor import Actor
from rein.models.critic import Critic
from rein.models.load import trunk_of
from rein.models.place import CPU, place_of
from rein.models.precision import refresh_copies
from rein.models.reference import Reference
from rein.models.save import give_whole
from rein.models.ulysses import Slices
from rein.probe import Probe
from rein.protocols import Mesh, RolloutEngine
from rein.runtime import fsdp
from rein.runtime.crews import current
from rein.runtime.ranks import OWN, Led, Made, Ranks, started
from rein.runtime.single import SINGLE
from rein.snapshots import RunState, Shard, load, write_alone, write_shard
from rein.types import Trajectory

T = TypeVar("T")
Reopen = Callable[..., Mapping[str, Any]]  # the models of a recipe; of these roles alone, where given
TOGETHER = {  # of each object, the calls that every rank makes
    "learner": ("backward", "apply", "discard", "forget", "soften", "shorten", "control_kl"),
    "pupil": ("backward", "apply", "measure"),
    "passes": ("log_probs", "values", "exact_kl"),
    "probe": ("measure",),
    "engine": ("generate",),
    "files": ("save", "write", "restore"),
}
ROLES = {"actor", "critic"}
NOT_OF_LOADING = {
    *("path", "logits_chunk", "use_torch_compile"),
    *("device", "attn_implementation", "use_liger"),  # in the place
}
KEPT = "experience/"  # begins the names of a snapshot's tensors that are no rank's but the batch's


class Team:
    """The models of a stage by their roles; over ranks each holds a part of every one."""

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        models: Mapping[str, Any],
        reference: Reference | None = None,
        name: str = "",  # where there are several teams
    ) -> None:
        self.recipe, self.mesh, self.models, self.reference = recipe, mesh, models, reference
        self.name, self.alone = name, mesh is SINGLE
        self.share = mesh  # the ranks that have other rows than this one
        self.learner: Any = None  # what is trained by: set where it is made
        if isinstance(mesh, Ranks):
            self._slice(mesh, recipe.fsdp.ulysses_sequence_parallel_size)
            for model in models.values():
                _cut(recipe, mesh, model)
        self._files: Files | None = None

    def _slice(self, ranks: Ranks, size: int) -> None:
        """Let so many ranks share each pack, where the models can."""
        reference = self.reference.actor if self.reference is not None else None
        sliced = [model for model in (*self.models.values(), reference) if hasattr(model, "slices")]
        if size > 1 and sliced:
            self.share, group = ranks.cut_in(size)
            for model in sliced:
                model.slices = Slices(group)

    @property
    def actor(self) -> Actor:
        return cast(Actor, self.models.get("actor"))  # that of a lone critic is another team's

    @property
    def critic(self) -> Critic | None:
        return self.models.get("critic")

    def made(self, name: str, make: Callable[..., T], *given: Any, **options: Any) -> T:
        """What `make(team, *given, **options)` gives, made by every rank."""
        if not isinstance(self.mesh, Ranks):
            return make(self, *given, **options)
        self.mesh.tell(Made(name, make, "team", given, options))
        return cast(T, Led(self.mesh, name, make(self, *given, **options), TOGETHER[name]))

    @property
    def files(self) -> Files:
        """The same for the whole stage."""
        if self._files is None:
            self._files = self.made("files", Files)
        return self._files

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The learner's, as far as this process has it."""
        return cast("tuple[dict[str, Tensor], dict[str, Any]]", self.learner.state())

    def busy(self) -> dict[str, dict[str, float]]:
        """Seconds that workers were at work, by role and what they did; nothing where there are none."""
        return {}

    def write(self, draft: Path, tensors: Mapping[str, Any]) -> list[Shard]:
        """The tensors of a snapshot: of the learner's, each rank its part."""
        if not isinstance(self.mesh, Ranks):
            return write_alone(draft, tensors)
        kept = {name: tensor for name, tensor in tensors.items() if name.startswith(KEPT)}
        shards = self.files.write(draft)
        return [*shards, write_shard(draft, "experience.safetensors", kept)] if kept else shards

    def restore(self, state: RunState, key: str) -> None:
        """Put a learner's state back on every rank; `key`: of its part of the state's JSON."""
        if isinstance(self.mesh, Ranks):
            assert state.folder is not None
            self.files.restore(state.folder, key)
        else:
            self.learner.restore(_of_learner(state), state.meta[key])


def team_of(
    recipe: Recipe,
    models: Mapping[str, Any],
    reopen: Reopen,  # the same models, on another rank
    reference: Reference | None = None,
) -> Team:
    """The ranks or crews that this process leads; else this process alone."""
    crews = current()
    if not started() and crews is None:
        return Team(recipe, SINGLE, models, reference)
    for model in models.values():
        _blocks(model)
    _refuse_undividable(recipe, models)
    if crews is not None:
        from rein.stages.remote_team import RemoteTeam

        return RemoteTeam(recipe, crews, models, reopen, reference)
    ranks = Ranks()
    ranks.tell(Made("team", join, OWN, (recipe, reopen, reference is not None), {}))
    return Team(recipe, ranks, models, reference)


def join(
    ranks: Ranks,
    recipe: Recipe,
    reopen: Reopen,
    refers: bool,
    roles: Sequence[str] | None = None,
    name: str = "",
) -> Team:
    """Another rank's part: the models that it opens, all or those of `roles`."""
    models = reopen(recipe) if roles is None else reopen(recipe, roles)
    refers = refers and "actor" in models
    return Team(recipe, ranks, models, Reference(models["actor"]) if refers else None, name)


def model_options(recipe: Recipe) -> dict[str, Any]:
    """How models of a recipe are loaded; over ranks FSDP2 casts what `fast` computes in bfloat16."""
    place = CPU if current() is not None else place_of(recipe.model)  # a driver only looks at sizes
    options = recipe.model.model_dump(exclude=NOT_OF_LOADING) | {"place": place}
    return options | {"precision": "exact"} if shared() else options


def shared() -> bool:
    """Whether several processes share the models."""
    return started() or current() is not None


def _cut(recipe: Recipe, ranks: Ranks, model: Any) -> None:
    fsdp.shard(
        model.whole,
        _blocks(model),
        ranks.world_size,
        param_dtype=torch.bfloat16 if recipe.model.precision == "fast" else None,
        prefetch=recipe.fsdp.forward_prefetch,
        offload=recipe.fsdp.offload_policy,
    )


def _blocks(model: Any) -> list[nn.Module]:
    """The blocks of a model's trunk. Raises ConfigError where it has no list of them."""
    for part in trunk_of(model.model).children():
        if isinstance(part, nn.ModuleList):
            return list(part)
    raise ConfigError(
        f"runtime: FSDP2 knows no blocks in {type(model.model).__name__} ({model.path}); write runtime=single"
    )


def _refuse_undividable(recipe: Recipe, models: Mapping[str, Any]) -> None:
    size = recipe.fsdp.ulysses_sequence_parallel_size
    for role, model in models.items():
        heads = model.model.config.num_attention_heads
        if heads % size:
            raise ConfigError(
                f"fsdp.ulysses_sequence_parallel_size: {size} does not divide the {heads} heads of the "
                f"{role}; write a divisor"
            )


class Files:
    """Model folders and snapshots: every rank gives or takes its part, the first writes model folders."""

    def __init__(self, team: Team) -> None:
        self.team = team

    def save(self, role: str, path: Path) -> None:
        """A role's Hugging Face folder."""
        model = self.team.models[role]
        if self.team.mesh.rank == 0:
            model.save(path)
        else:
            give_whole(model.model)

    def write(self, draft: Path) -> list[Shard]:
        """A file for each rank, with what it holds of the learner's state. On rank 0 raises OSError."""
        ranks = self.team.mesh
        assert isinstance(ranks, Ranks)
        tensors, _ = self.team.learner.state()
        own: Shard | str
        try:
            name = f"{self.team.name}-rank" if self.team.name else "rank"
            own = write_shard(draft, f"{name}-{ranks.rank}.safetensors", tensors)
        except (OSError, SafetensorError) as error:  # rank 0 says so, for all
            own = f"rank {ranks.rank}: {error}"
        shards = ranks.gathered(own)
        faults = [shard for shard in shards if isinstance(shard, str)]
        if faults and ranks.rank == 0:
            raise OSError(faults[0])
        return shards

    def restore(self, folder: Path, key: str) -> None:
        """Read a snapshot's folder; of roles that another team has nothing is taken."""
        state = load(folder, kind=None)
        elsewhere = ROLES - set(self.team.models) if self.team.name else set[str]()
        tensors = _of_learner(state, elsewhere)
        meta = {name: value for name, value in state.meta[key].items() if name not in elsewhere}
        self.team.learner.restore(tensors, meta)


def _of_learner(state: RunState, but: Collection[str] = ()) -> dict[str, Any]:
    others = {KEPT, *(f"{role}/" for role in but)}
    return {name: tensor for name, tensor in state.tensors.items() if not name.startswith(tuple(others))}


def make_learner(team: Team, recipe: Recipe, **options: Any) -> Learner:
    found = Learner(
        recipe, team.models.get("actor"), team.critic, team.share, reference=team.reference, **options
    )
    team.learner = found
    return found


def make_passes(team: Team) -> Passes:
    return Passes(team.actor, team.critic, team.reference, team.share)


def make_probe(team: Team, rows: Sequence[Trajectory], budget: int) -> Probe:
    return Probe(team.actor, rows, budget, team.share)


def make_engine(team: Team, batch_size: int, stop_texts: Sequence[str]) -> RolloutEngine:
    actor = team.actor
    own = HfEngine(
        actor.model,
        actor.tokenizer,
        actor.stop_ids,
        batch_size=batch_size,
        stop_texts=stop_texts,
        before=partial(refresh_copies, actor.model),
    )
    if not isinstance(team.mesh, Ranks):
        return own
    return RankEngine(own, team.mesh, partial(fsdp.gathered, actor.whole))
