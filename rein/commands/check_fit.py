"""Whether a recipe fits the machine: peak memory by parts, what processes need together, sizes that divide.

Part of commands/check.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rein.commands.check_memory import Parts, stage_of
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
    "(over ranks the larger of these) and decoding; or, if more, the process and opening"
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
    there, takes = memory_of_machine(), dict[str, float]()
    for row, parts in memory.items():
        takes[stage_of(row)] = takes.get(stage_of(row), 0.0) + parts.total * processes(recipe, row)
    stage = max(takes, key=lambda name: takes[name])
    kinds = {row: parts for row, parts in memory.items() if stage_of(row) == stage}
    said = [f"{stage} needs most: {_needed(recipe, kinds, takes[stage])}; here are {_bytes(there)}"]
    if recipe.nnodes > 1 and recipe.runtime == "fsdp":
        said.append(f"nnodes {recipe.nnodes}: needs torchrun on each machine, each with that much memory")
    elif recipe.nnodes > 1 and recipe.ray.address is not None:
        said.append(f"nnodes {recipe.nnodes}: each machine of the cluster needs that much memory")
    if takes[stage] <= there:
        return said, []
    do = (
        "lower actor.ppo_max_token_len_per_gpu, or use model.lora_rank or model.enable_gradient_checkpointing"
    )
    return said, [f"{stage} needs {_bytes(takes[stage])}, this machine has {_bytes(there)}: {do}"]


def _needed(recipe: Recipe, kinds: Mapping[str, Parts], together: float) -> str:
    """By the processes of a stage, of one kind or several."""
    if len(kinds) == 1:
        ((row, parts),) = kinds.items()
        count = processes(recipe, row)
        where = f"{count} processes of a machine, {_bytes(together)} together" if count > 1 else "one process"
        return f"{_bytes(parts.total)} in {where}"
    of_kinds = [
        f"{processes(recipe, row)} x {_bytes(parts.total)} ({row.partition(': ')[2] or 'worker'})"
        for row, parts in kinds.items()
    ]
    return f"{' + '.join(of_kinds)} on a machine, {_bytes(together)} together"


def processes(recipe: Recipe, row: str) -> int:
    """Of a row of the estimate, that one machine holds at a time; Ray spreads a crew's over the machines."""
    if row.endswith(": driver") or not (recipe.ranks > 1 and stage_of(row) in pipeline.ON_RANKS):
        return 1
    here = recipe.runtime == "ray" and recipe.ray.address is None  # a cluster of this machine alone
    return recipe.ranks if here else recipe.nproc


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
