"""What will watch the training of a recipe, in one line: rules, intervals, the disk of rollback points.

Part of commands/check.py.
"""

from __future__ import annotations

from rein.commands.check_memory import Parts
from rein.commands.check_plan import Plan
from rein.config.recipe import Recipe
from rein.guards.presets import acts, guards_of
from rein.guards.rules import RuleGuard
from rein.protocols import Guard

NEWEST, PROTECTED = 2, 3  # snapshots that stay; the last good one, the best, the next to be confirmed


def snapshot_bytes(parts: Parts) -> float:
    """Of one snapshot: the trained weights of actor and critic beside Adam's two moments of each."""
    return 1.5 * parts.adam


def guards_line(recipe: Recipe, plan: Plan, parts: Parts | None) -> str:
    """guards: standard, 31 rules; probe every 8 updates; snapshot every 32, at most 5 kept: ~68 MiB"""
    settings, guards = recipe.guards, guards_of(recipe.guards)
    kept = NEWEST + PROTECTED if acts(guards) else NEWEST
    if not acts(guards):
        when = "snapshots for resume alone"
    elif settings.snapshot_every > 0:
        when = f"snapshot every {settings.snapshot_every}"
    else:
        when = "snapshots of the start and the best"
    disk = ""
    if parts is not None:  # each rank writes its part
        disk = f": ~{kept * recipe.ranks * snapshot_bytes(parts) / 2**20:,.0f} MiB"
    told = [
        f"guards: {settings.preset}, {len(guards)} rule{'' if len(guards) == 1 else 's'}",
        f"probe every {settings.probe_every} updates",
        f"{when}, at most {kept} kept{disk}",
    ]
    if any(map(_of_validation, guards)) and not 0 < recipe.trainer.test_freq < plan.batches:
        why = "1 batch" if plan.batches == 1 else f"trainer.test_freq={recipe.trainer.test_freq}"
        told.append(f"val/* rules see nothing between the start and the end ({why})")
    return "; ".join(told)


def _of_validation(guard: Guard) -> bool:
    return isinstance(guard, RuleGuard) and (guard.rule.metric or "").startswith("val/")
