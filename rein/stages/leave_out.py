"""Rows that answer none of the prompts of data.leave_out. Not a verb."""

from __future__ import annotations

from collections.abc import Sequence

from rein.config.recipe import Recipe
from rein.data.loader import load_prompts
from rein.data.split import Row, prompt_key
from rein.data.tokenize import Encoder


def without_prompts(rows: Sequence[Row], recipe: Recipe, encoder: Encoder) -> list[Row]:
    """The rows whose prompt is in none of the files; a prompt is known by its ids."""
    if not recipe.data.leave_out:
        return list(rows)
    others = load_prompts(recipe.data.leave_out, encoder, recipe.data).rows
    keys = {prompt_key(prompt.prompt_ids) for prompt in others}
    return [row for row in rows if prompt_key(row.prompt_ids) not in keys]
