"""The process that a stage runs in: memory, threads, compiling, and the ranks that it leads. Not a verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rein.config.recipe import Recipe
from rein.errors import ConfigError, RankLost
from rein.runtime import torchrun
from rein.runtime.memory import free_models, give_back_freed_memory, keep_few_kernels, keep_freed_memory
from rein.tracking.console import Console

Stage = Callable[[Recipe, Console], dict[str, Any]]


def on_ranks(entry: Stage, recipe: Recipe, console: Console) -> dict[str, Any]:
    """A stage's facts; where a rank is lost it begins again, as often as the recipe allows."""
    if recipe.runtime != "single" and recipe.nproc == recipe.nnodes == torchrun.started() == 1:
        console.say("note: runtime fsdp with nproc 1 is one process, as single is")
    left = 0 if torchrun.under_torchrun() else recipe.restarts
    while True:
        try:
            with _ranks(recipe):
                return dict(entry(recipe, console))
        except RankLost as error:
            if not left:
                raise
            free_models()
            left, recipe = left - 1, recipe.model_copy(update={"resume": "auto"})
            what = str(error).partition(";")[0]
            console.say(f"{what}; beginning again, at most {left} more times after this")


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


def _prepare_rank(ranks: Any, recipe: Recipe) -> None:
    import torch

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
