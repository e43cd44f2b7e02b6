"""`rein check`: the plan of a recipe, an estimate of its peak memory, and what looks unusual.

Opens the data as the stages will, loads no weights, writes nothing. With --try two updates on 16 real rows
are made and thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rein.commands.check_audit import as_planned, audited
from rein.commands.check_fit import SUM, fit_lines, memory_table, refuse_undividable
from rein.commands.check_guards import guards_line
from rein.commands.check_memory import Parts, estimate, is_apart, stage_of
from rein.commands.check_plan import Plan, open_encoder, plan_all
from rein.commands.check_shapes import Shape, refuse_damaged, sizes
from rein.config import paths
from rein.config.recipe import Recipe
from rein.config.rules import kl_coefs
from rein.stages import pipeline
from rein.tracking.console import Console

SMALL = 10_000_000  # parameters below which higher learning rates are usual
RATES = {"actor": (1e-7, 1e-4), "critic": (1e-7, 1e-3), "sft": (1e-7, 1e-4), "reward": (1e-7, 1e-4)}
LORA_FACTOR, SMALL_FACTOR = 10, 100  # adapters and small models take that much higher rates
ROWS = {
    "data.train_batch_size": (16, 16384),
    "actor.ppo_mini_batch_size": (8, 4096),
    "sft.batch_size": (4, 1024),
    "reward.batch_size": (4, 1024),
}


def run(recipe: Recipe, console: Console, *, rehearse: bool = False) -> dict[str, Any]:
    """Print the plan; returns it. Raises what the stages would raise for missing or unusable inputs."""
    pipeline.preflight(recipe, recipe.stages)
    given, recipe = recipe, as_planned(recipe)
    refuse_damaged(recipe)
    plans = plan_all(recipe, open_encoder(recipe, Path(paths.base_model(recipe)).expanduser()))
    shapes = sizes(recipe)
    refuse_undividable(recipe, shapes)
    memory = estimate(recipe, plans, shapes)
    console.say(f"plan of {recipe.out}: {', '.join(recipe.stages)}")
    for line in _table(*_plan_table(plans)):
        console.say(f"  {line}")
    if "train" in plans:
        console.say(f"  {kl_coefs(recipe).note}")
    for plan in plans.values():
        for note in plan.notes:
            console.say(f"  {plan.stage}: {note}")
    console.say(f"peak memory{_of_each(recipe)}, estimated:")
    for line in _table(*memory_table(memory)):
        console.say(f"  {line}")
    fits, too_small = fit_lines(recipe, memory)
    for line in [*([SUM] if memory else []), *fits]:
        console.say(f"  {line}")
    for role, shape in shapes.items():
        on_actors = role == "critic" and recipe.critic.model.share_trunk
        console.say(f"  {role}: {'adapters on the trunk of the actor' if on_actors else _millions(shape)}")
    if "train" in plans:
        console.say(guards_line(recipe, plans["train"], _trained(memory)))
    said, warned = audited(given)
    for line in said:
        console.say(f"  {line}")
    warnings = [
        *warned,
        *too_small,
        *_size_warnings(shapes),
        *_rate_warnings(recipe, shapes),
        *_batch_warnings(recipe, plans),
    ]
    for warning in warnings:
        console.say(f"warning: {warning}")
    if rehearse:
        _rehearse(recipe, console)
    return {"plans": plans, "memory": memory, "sizes": shapes, "warnings": warnings}


def _of_each(recipe: Recipe) -> str:
    if recipe.ranks == 1:
        return ""
    what = "processes" if recipe.runtime == "fsdp" else "workers"
    train = "train's actor, train's critic" if is_apart(recipe) else "train"
    return f" of each of {recipe.ranks} {what} (sft, reward, {train})"


def _trained(memory: dict[str, Parts]) -> Parts | None:
    """What a rank of train, or one of each role's, holds together of what snapshots have."""
    found = [parts.adam for row, parts in memory.items() if stage_of(row) == "train"]
    return Parts(adam=sum(found)) if found else None


def _rehearse(recipe: Recipe, console: Console) -> None:
    from rein.commands.check_try import rehearse  # imports torch

    console.say("rehearsal:")
    metrics = rehearse(recipe, console)
    console.say("rehearsal: two updates on 16 of the rows made and thrown away")
    for name, value in sorted(metrics.items()):
        console.say(f"  {name} {value:.6g}")


def _plan_table(plans: dict[str, Plan]) -> tuple[Sequence[str], list[Sequence[str]]]:
    rows: list[Sequence[str]] = []
    for plan in plans.values():
        counts = ["-" if n is None else f"{n:,}" for n in (plan.rows_in, plan.left_out, plan.used)]
        work = f"{plan.work} (rows made by {plan.made_by})" if plan.made_by else plan.work
        rows.append([plan.stage, *counts, _thousands(plan.tokens), work])
    return ("stage", "rows in", "left out", "used", "tokens", "work"), rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned lines: the first and last columns to the left, numbers to the right."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    last = len(head) - 1
    return [
        "  ".join(
            cell if i == last else cell.ljust(widths[i]) if i == 0 else cell.rjust(widths[i])
            for i, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def _thousands(tokens: float) -> str:
    if not tokens:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"~{tokens / size:.3g}{unit}"
    return f"~{tokens:.0f}"


def _millions(shape: Shape | None) -> str:
    return (
        "size unknown (no config.json with safetensors)"
        if shape is None
        else f"{shape.parameters / 1e6:.1f}M parameters"
    )


def _size_warnings(shapes: dict[str, Shape | None]) -> list[str]:
    known = {role: shape.parameters for role, shape in shapes.items() if shape is not None}
    if len(known) < 2:
        return []
    small, large = min(known, key=lambda r: known[r]), max(known, key=lambda r: known[r])
    ratio = known[large] / known[small]
    if ratio <= 2:
        return []
    return [f"the {large} is {ratio:.1f} times the {small}'s size; equal sizes are the stable pairing"]


def _rate_warnings(recipe: Recipe, shapes: dict[str, Shape | None]) -> list[str]:
    rates = {"actor": recipe.actor.optim.lr, "critic": recipe.critic.optim.lr}
    rates = rates if "train" in recipe.stages else {}
    rates |= {stage: getattr(recipe, stage).optim.lr for stage in ("sft", "reward") if stage in recipe.stages}
    actor, found = shapes.get("actor"), []
    factor = LORA_FACTOR if recipe.model.lora_rank else 1
    factor = SMALL_FACTOR if actor is not None and actor.parameters < SMALL else factor
    for role, rate in rates.items():
        low, high = RATES[role]
        high *= factor if role != "critic" else 1
        if not low <= rate <= high:
            found.append(f"{role}.optim.lr {rate:g} is outside the usual {low:g} to {high:g}")
    return found


def _batch_warnings(recipe: Recipe, plans: dict[str, Plan]) -> list[str]:
    found = []
    stage_of = {"data": "train", "actor": "train", "sft": "sft", "reward": "reward"}
    for key, (low, high) in ROWS.items():
        section, name = key.split(".")
        size = getattr(getattr(recipe, section), name)
        if stage_of[section] in plans and not low <= size <= high:
            found.append(f"{key} {size} rows is outside the usual {low} to {high}")
    train, budget = plans.get("train"), recipe.actor.token_budget
    if train is not None and recipe.actor.use_dynamic_bsz and train.longest > budget:
        found.append(
            f"the longest row may have {train.longest} tokens; actor.ppo_max_token_len_per_gpu is {budget}: "
            "such a row is a micro-batch of its own and needs more memory"
        )
    return found
