"""The process that a stage runs in: memory, threads, compiling, and the ranks that it leads. Not a verb."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from rein.config import paths
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.errors import ConfigError, RankLost
from rein.runtime import torchrun
from rein.runtime.memory import free_models, give_back_freed_memory, keep_few_kernels, keep_freed_memory
from rein.tracking.console import Console

Stage = Callable[[Recipe, Console], dict[str, Any]]


def on_ranks(stage: str, entry: Stage, recipe: Recipe, console: Console) -> dict[str, Any]:
    """A stage's facts; where a rank is lost it begins again, as often as the recipe allows."""
    if recipe.runtime == "fsdp" and recipe.nproc == recipe.nnodes == torchrun.started() == 1:
        console.say("note: runtime fsdp with nproc 1 is one process, as single is")
    if recipe.runtime == "ray" and not recipe.ray.gpus_per_worker:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu"})})
    left = allowed = 0 if torchrun.under_torchrun() else recipe.restarts
    began = time.time()
    while True:
        try:
            with _crews(stage, recipe, again=left < allowed) if recipe.runtime == "ray" else _ranks(recipe):
                return dict(entry(recipe, console))
        except RankLost as error:
            if not left:
                raise
            free_models()
            left -= 1
            if _saved(stage, recipe, began):  # else the recipe's own word holds: it may be `never`, or a path
                recipe = recipe.model_copy(update={"resume": "auto"})
            what = str(error).partition(";")[0]
            console.say(f"{what}; beginning again, at most {left} more times after this")


def _saved(stage: str, recipe: Recipe, since: float) -> bool:
    """Whether the stage has a snapshot that is no older than that."""
    snapshots = paths.stage_dir(recipe, stage) / "snapshots"
    return any(path.stat().st_mtime >= since for path in snapshots.glob("step-*"))


@contextmanager
def clustered(recipe: Recipe, spread: Collection[str]) -> Iterator[None]:
    """Inside, stages share one Ray cluster, where the recipe asks for any; `spread`: those that need crews.

    Raises ConfigError at once where it is too small for one of them.
    """
    if recipe.runtime != "ray":
        yield
        return
    from rein.runtime.cluster import joined, refuse_more
    from rein.runtime.crews import bundles

    with joined(recipe.ray.address):
        for stage in spread:
            refuse_more(
                bundles(len(_crew_names(stage, recipe)), recipe.nproc, recipe.nnodes, _worker(recipe))
            )
        yield


@contextmanager
def _ranks(recipe: Recipe) -> Iterator[None]:
    """Inside, this process leads the ranks that the recipe asks for. Raises ConfigError for too few GPUs."""
    if recipe.runtime == "single":
        if (ranks := torchrun.started()) > 1:
            raise ConfigError(f"runtime: single, but torchrun started {ranks} processes; write runtime=fsdp")
        yield
        return
    import torch

    from rein.runtime.launch import launched
    from rein.runtime.ranks import OWN, Made, Ranks, started

    _take_gpu(recipe)
    with launched(recipe.nproc, recipe.nnodes):
        if started():
            Ranks().tell(Made("process", _prepare_rank, OWN, (recipe,), {}))
        before = torch.get_num_threads()
        if recipe.threads is None:
            torch.set_num_threads(max(before // recipe.nproc, 1))
        try:
            yield
        finally:
            torch.set_num_threads(before)


@contextmanager
def _crews(stage: str, recipe: Recipe, *, again: bool) -> Iterator[None]:
    """Inside, this process leads the crews that the recipe asks for; `again`: one of them has ended."""
    if torchrun.under_torchrun():
        raise ConfigError("runtime: ray, but torchrun started this process; call rein by itself, once")
    from rein.runtime.cluster import joined
    from rein.runtime.crews import led

    with (
        joined(recipe.ray.address),
        led(
            _crew_names(stage, recipe),
            nproc=recipe.nproc,
            nnodes=recipe.nnodes,
            worker=_worker(recipe),
            prepare=(_prepare_worker, recipe),
            again=again,
        ),
    ):
        yield


def _crew_names(stage: str, recipe: Recipe) -> tuple[str, ...]:
    """A crew for all roles, or one for each."""
    apart = stage == "train" and recipe.critic.placement == "separate" and "critic" in needs(recipe)
    return ("actor", "critic") if apart else ("",)


def _worker(recipe: Recipe) -> dict[str, float]:
    """What each worker asks of the cluster."""
    return {"CPU": recipe.ray.cpus_per_worker, "GPU": recipe.ray.gpus_per_worker}


def _prepare_worker(ranks: Any, recipe: Recipe) -> None:
    import torch

    _take_gpu(recipe)
    torch.set_num_threads(max(int(recipe.ray.cpus_per_worker), 1))
    prepare_process(recipe)


def _take_gpu(recipe: Recipe) -> None:
    from rein.models.place import place_of
    from rein.runtime.gpu import take_own_gpu

    if place_of(recipe.model).device == "cuda":
        take_own_gpu(1 if recipe.runtime == "ray" else recipe.nproc)  # Ray shows a worker no other's
    elif recipe.fsdp.offload_policy:
        raise ConfigError(
            "fsdp.offload_policy: true frees a GPU's memory, and models lie on the CPU here; write false"
        )


def _prepare_rank(ranks: Any, recipe: Recipe) -> None:
    import torch

    _take_gpu(recipe)
    torch.set_num_threads(max(torch.get_num_threads() // recipe.nproc, 1))
    prepare_process(recipe)


def prepare_process(recipe: Recipe) -> None:
    """Keep freed memory for the next tensors, over ranks give it back; take the recipe's `threads`; compile.

    Raises ConfigError where this machine cannot compile.
    """
    keep_few_kernels()
    if recipe.runtime == "single":
        keep_freed_memory()
    else:
        give_back_freed_memory()
    if recipe.threads is not None:
        import torch

        torch.set_num_threads(recipe.threads)
    if recipe.model.use_torch_compile:
        from rein.models.elementwise import compile_steps

        compile_steps()
