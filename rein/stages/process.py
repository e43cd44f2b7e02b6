"""The process that a stage runs in: memory, threads, compiling, and the ranks that it leads. Not a verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.errors import ConfigError, RankLost
from rein.runtime import torchrun
from rein.runtime.memory import free_models, give_back_freed_memory, keep_freed_memory
from rein.tracking.console import Console

Stage = Callable[[Recipe, Console], dict[str, Any]]


def on_ranks(stage: str, entry: Stage, recipe: Recipe, console: Console) -> dict[str, Any]:
    """A stage's facts; where a rank is lost it begins again, as often as the recipe allows."""
    if recipe.runtime == "fsdp" and recipe.nproc == recipe.nnodes == torchrun.started() == 1:
        console.say("note: runtime fsdp with nproc 1 is one process, as single is")
    left = allowed = 0 if torchrun.under_torchrun() else recipe.restarts
    while True:
        try:
            with _crews(stage, recipe, again=left < allowed) if recipe.runtime == "ray" else _ranks(recipe):
                return dict(entry(recipe, console))
        except RankLost as error:
            if not left:
                raise
            free_models()
            left, recipe = left - 1, recipe.model_copy(update={"resume": "auto"})
            what = str(error).partition(";")[0]
            console.say(f"{what}; beginning again, at most {left} more times after this")


@contextmanager
def clustered(recipe: Recipe) -> Iterator[None]:
    """Inside, stages share one Ray cluster, where the recipe asks for any."""
    if recipe.runtime != "ray":
        yield
        return
    from rein.runtime.cluster import joined

    with joined(recipe.ray.address):
        yield


@contextmanager
def _ranks(recipe: Recipe) -> Iterator[None]:
    """Inside, this process leads the ranks that the recipe asks for."""
    if recipe.runtime == "single":
        if (ranks := torchrun.started()) > 1:
            raise ConfigError(f"runtime: single, but torchrun started {ranks} processes; write runtime=fsdp")
        yield
        return
    import torch

    from rein.runtime.launch import launched
    from rein.runtime.ranks import OWN, Made, Ranks, started

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
    from rein.runtime.cluster import FULL, joined
    from rein.runtime.crews import led

    own = recipe.ray
    apart = stage == "train" and recipe.critic.placement == "separate" and "critic" in needs(recipe)
    with (
        joined(own.address),
        led(
            ("actor", "critic") if apart else ("",),
            nproc=recipe.nproc,
            nnodes=recipe.nnodes,
            worker={"CPU": own.cpus_per_worker, "GPU": own.gpus_per_worker},
            prepare=(_prepare_worker, recipe),
            patience=FULL if again else 0.0,
        ),
    ):
        yield


def _prepare_worker(ranks: Any, recipe: Recipe) -> None:
    import torch

    torch.set_num_threads(max(int(recipe.ray.cpus_per_worker), 1))
    prepare_process(recipe)


def _prepare_rank(ranks: Any, recipe: Recipe) -> None:
    import torch

    torch.set_num_threads(max(torch.get_num_threads() // recipe.nproc, 1))
    prepare_process(recipe)


def prepare_process(recipe: Recipe) -> None:
    """Keep freed memory for the next tensors, over ranks give it back; take the recipe's `threads`; compile.

    Raises ConfigError where this machine cannot compile.
    """
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
