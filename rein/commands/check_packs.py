"""The largest micro-batch that a stage's updates will compute together. Part of commands/check.py.

Where rows are there they are cut as training cuts them; rows still to be made are reckoned by their means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.data.batches import chunks, epoch_batches, row_batches
from rein.data.groups import units
from rein.sharing import families
from rein.types import Trajectory

ENOUGH = 10_000  # rows that are cut: more do not change the largest by much


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch."""

    tokens: float  # positions: a prompt that several rows answer counts once
    answered: float  # response tokens: positions whose logits are made
    turns: int  # micro-batches that a rank computes one after the other in an update, at most


def groups_of_ranks(recipe: Recipe) -> int:
    """How many ranks have rows of their own."""
    return max(recipe.ranks // recipe.fsdp.ulysses_sequence_parallel_size, 1)


def largest_pack(recipe: Recipe, rows: Sequence[Trajectory]) -> Pack | None:
    """Of the updates of the first epoch; None where there are no rows.

    Batches are those that training will make; mini-batches are cut from them in their order.
    """
    if not rows:
        return None
    data, keep, wanted = recipe.data, recipe.data.keep_groups, needs(recipe)
    whole = units(rows, paired="pairs" in wanted and not keep, grouped="groups" in wanted or keep)
    tokens = answered = turns = seen = 0
    for batch in epoch_batches(whole, data.train_batch_size, recipe.data_seed, 0, data.shuffle):
        for size in {recipe.actor.ppo_mini_batch_size, recipe.critic.ppo_mini_batch_size or 0} - {0}:
            for mini in chunks(batch, size):
                parts = _cut(recipe, some := [rows[i] for i in mini])
                turns = max(turns, ceil(len(parts) / groups_of_ranks(recipe)))
                for part in parts:
                    found = [some[i] for i in part]
                    tokens = max(tokens, positions(found))
                    answered = max(answered, sum(len(row.response_ids) for row in found))
        seen += len(batch)
        if seen > ENOUGH:
            break
    return Pack(tokens, answered, turns)


def _cut(recipe: Recipe, rows: Sequence[Trajectory]) -> list[list[int]]:
    if not recipe.actor.use_dynamic_bsz:
        return chunks(range(len(rows)), recipe.actor.ppo_micro_batch_size or len(rows))
    return row_batches(rows, recipe.actor.token_budget, share=True, ranks=groups_of_ranks(recipe))


def positions(rows: Sequence[Trajectory]) -> int:
    """Of a pack of these rows."""
    prompts = sum(len(rows[family[0]].prompt_ids) for family in families(rows))
    return prompts + sum(len(row.response_ids) for row in rows)


def reckoned_pack(
    rows: float, mean: float, longest: float, budget: float, *, prompt: float = 0.0, ranks: int = 1
) -> Pack:
    """Of so many rows to an update, cut into as few micro-batches as can be, all about equally long.

    `mean`, `longest` and `prompt` (a mean) are tokens of a row.
    """
    count = max(ceil(rows * mean / budget), 1)
    count += -count % ranks
    tokens = max(rows * mean / count, longest)
    share = 1 - prompt / mean if mean else 1.0
    return Pack(tokens, tokens * share, ceil(count / ranks))
