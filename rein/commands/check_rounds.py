"""What a recipe's rounds of fresh rollouts will do, for `rein check`. Imports no torch."""

from __future__ import annotations

from math import ceil

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.loader import load_prompts
from rein.data.split import prompt_key
from rein.data.tokenize import Encoder


def rounds_of(recipe: Recipe, encoder: Encoder, batches: int) -> tuple[str, ...]:
    """How many rounds there are and what each makes; reads the prompts as rollout will."""
    every, rollout = recipe.trainer.refresh_every, recipe.rollout
    if every < 1 or every >= batches:
        return ()
    loaded = load_prompts(paths.rollout_files(recipe), encoder, recipe.data)
    prompts = len({prompt_key(prompt.prompt_ids) for prompt in loaded.rows})
    asked = min(prompts, rollout.max_prompts or prompts)
    return (
        f"trainer.refresh_every {every}: {ceil(batches / every) - 1} more rounds, in each of which up to "
        f"{asked} of {prompts} prompts get {rollout.n} fresh answers, scored by "
        f"{' + '.join(spec.name for spec in recipe.score.reward)}",
    )
