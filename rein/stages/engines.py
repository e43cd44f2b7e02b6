"""Which engine answers the prompts of a stage: the recipe in, an engine out. Not a verb.

Each engine is one line of ENGINES; a user's is named `pkg.mod:name` and made in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.engines.server import ServerEngine
from rein.errors import ConfigError
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


def server(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """Over HTTP. Raises ConfigError where there is no URL, or no key in the variable that should hold it."""
    given = recipe.rollout.server
    key = None if given.api_key_env is None else os.environ.get(given.api_key_env)
    if given.api_key_env is not None and not key:
        raise ConfigError(f"rollout.server.api_key_env: {given.api_key_env} is not set; export the key in it")
    return ServerEngine(
        given.url,
        actor.tokenizer,
        actor.stop_ids,
        vocabulary=actor.vocabulary,
        context=getattr(actor.model.config, "max_position_embeddings", None) or 2**31,
        model=given.model,
        key=key,
        concurrency=given.concurrency,
        timeout=given.timeout,
        retries=given.retries,
        stop_texts=recipe.rollout.stop,
    )


ENGINES: dict[str, Maker] = {"hf": hf, "server": server}


def engine_of(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """The engine that the recipe names, with the actor's weights.

    Raises ConfigError for an unknown name.
    """
    make: Maker = lookup(ENGINES, recipe.rollout.engine, "rollout.engine")
    return make(recipe, actor)


def keeps_answers(recipe: Recipe) -> bool:
    """Whether answers are kept as they come: of engines that may fail, or whose answers differ each time."""
    return recipe.rollout.engine != "hf"
