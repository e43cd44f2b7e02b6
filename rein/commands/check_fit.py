"""Whether a recipe fits the machine: peak memory by parts, what processes need together, sizes that divide.

Part of commands/check.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rein.commands.check_memory import Parts
from rein.commands.check_shapes import Shape
from rein.config.recipe import Recipe
from rein.errors import ConfigError
from rein.stages import pipeline

GIB = 2**30
COLUMNS = {
    "weights": "weights",
    "gradients": "gradients",
    "Adam": "adam",
    "gathered": "gathered",
    "activations": "activations",
    "probe": "probe",
    "decoding": "decoding",
    "opening": "opening",
    "holes": "holes",
    "sum": "total",
}
SUM = (
    "sum: the process, weights, Adam, holes, and the larger of gradients + gathered + activations + probe "
    "(over ranks the larger of these) and decoding"
)


def memory_table(memory: Mapping[str, Parts]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """A row for each stage; parts that none has are left out."""
    columns = {head: name for head, name in COLUMNS.items() if any(getattr(p, name) for p in memory.values())}
    rows: list[Sequence[str]] = [
        [stage, *(_bytes(getattr(p, name)) for name in columns.values())] for stage, p in memory.items()
    ]
    return ("stage", *columns), rows


def fit_lines(recipe: Recipe, memory: Mapping[str, Parts]) -> tuple[list[str], list[str]]:
    """What the stage that needs most takes of this machine, and a warning where it has not so much."""
    if not memory:
        return [], []
    there = memory_of_machine()
    takes = {stage: parts.total * processes(recipe, stage) for stage, parts in memory.items()}
    stage = max(takes, key=lambda name: takes[name])
    count = processes(recipe, stage)
    together = (
        f"{count} processes of a machine, {_bytes(takes[stage])} together" if count > 1 else "one process"
    )
    said = [f"{stage} needs most: {_bytes(memory[stage].total)} in {together}; here are {_bytes(there)}"]
    if recipe.nnodes > 1:
        said.append(f"nnodes {recipe.nnodes}: needs torchrun on each machine, each with that much memory")
    if takes[stage] <= there:
        return said, []
    do = (
        "lower actor.ppo_max_token_len_per_gpu, or use model.lora_rank or model.enable_gradient_checkpointing"
    )
    return said, [f"{stage} needs {_bytes(takes[stage])}, this machine has {_bytes(there)}: {do}"]


def processes(recipe: Recipe, stage: str) -> int:
    """That one machine holds at a time."""
    return recipe.nproc if recipe.ranks > 1 and stage in pipeline.ON_RANKS else 1


def memory_of_machine() -> float:
    """Bytes."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def refuse_undividable(recipe: Recipe, shapes: Mapping[str, Shape | None]) -> None:
    """Raise ConfigError where ranks that share a pack could not share its heads, as the stages do."""
    size = recipe.fsdp.ulysses_sequence_parallel_size
    for role in ("actor", "critic"):
        shape = shapes.get(role)
        if shape is not None and shape.heads % size:
            raise ConfigError(
                f"fsdp.ulysses_sequence_parallel_size: {size} does not divide the {shape.heads} heads of the "
                f"{role}; write a divisor"
            )


def _bytes(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
