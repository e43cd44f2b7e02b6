"""Which engine answers the prompts of a stage: the recipe in, an engine out. Not a verb.

Each engine is one line of ENGINES; a user's is named `pkg.mod:name` and made in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.protocols import RolloutEngine
from rein.tables import lookup

if TYPE_CHECKING:
    from rein.models.actor import Actor

Maker = Callable[[Recipe, "Actor"], RolloutEngine]


def hf(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """In this process, with the actor's own weights."""
    return HfEngine(
        actor.model,
        actor.tokenizer,
        actor.stop_ids,
        batch_size=recipe.rollout.batch_size,
        stop_texts=recipe.rollout.stop,
    )


ENGINES: dict[str, Maker] = {"hf": hf}


def engine_of(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """The engine that the recipe names, with the actor's weights.

    Raises ConfigError for an unknown name.
    """
    make: Maker = lookup(ENGINES, recipe.rollout.engine, "rollout.engine")
    return make(recipe, actor)
