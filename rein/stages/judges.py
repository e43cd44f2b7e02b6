"""Which rewards judge held-out answers: the truth, and the proxy that may be gamed. Not a verb."""

from __future__ import annotations

from collections.abc import Sequence

from rein.config.recipe import Recipe, RewardSpec, Score
from rein.rewards import uses_model


def truth(recipe: Recipe) -> Sequence[RewardSpec]:
    return recipe.evaluate.reward or recipe.score.reward


def proxy(recipe: Recipe) -> Sequence[RewardSpec]:
    """What training maximises where that is not the truth, else the recipe's reward model, else nothing."""
    names_one = "score" in recipe.stages or recipe.score.reward != Score().reward
    if names_one and truth(recipe) != recipe.score.reward:
        return recipe.score.reward
    has_model = recipe.score.path is not None or "reward" in recipe.stages
    return [RewardSpec(name="model")] if has_model and not uses_model(truth(recipe)) else []
