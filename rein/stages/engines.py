"""Which engine answers the prompts of a stage: the recipe in, an engine out. Not a verb.

Each engine is one line of ENGINES; a user's is named `pkg.mod:name` and made in the same way. An engine in a
process of its own outlives its stage: the next takes it over with other weights.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.engines.server import ServerEngine
from rein.engines.vllm import VllmEngine
from rein.errors import ConfigError
from rein.protocols import RolloutEngine
from rein.tables import lookup

if TYPE_CHECKING:
    from rein.models.actor import Actor

Maker = Callable[[Recipe, "Actor"], RolloutEngine]


class Kept(NamedTuple):
    """An engine that is open, what it was made with, and whose weights it has."""

    engine: VllmEngine
    settings: dict[str, Any]
    weights: list[tuple[str, int, int]]


KEPT: list[Kept] = []  # one at most


def hf(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """In this process, with the actor's own weights."""
    return HfEngine(
        actor.model,
        actor.tokenizer,
        actor.stop_ids,
        batch_size=recipe.rollout.batch_size,
        stop_texts=recipe.rollout.stop,
    )


def vllm(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """In a process of its own, which reads the actor's folder; kept until close_engines()."""
    rollout, own = recipe.rollout, recipe.rollout.vllm
    longest = recipe.data.max_prompt_length + (rollout.max_new_tokens or recipe.data.max_response_length)
    context = getattr(actor.model.config, "max_position_embeddings", None) or 2**31
    settings: dict[str, Any] = {
        "stop_ids": actor.stop_ids,
        "stop_texts": rollout.stop,
        "python": own.python,
        "max_model_len": min(own.max_model_len or longest, context),
        "batch_size": rollout.batch_size,
        "dtype": own.dtype,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enforce_eager": own.enforce_eager,
        "trust_remote_code": recipe.model.trust_remote_code,
        "threads": recipe.threads,
        "start_timeout": own.start_timeout,
    }
    weights = _weights(actor.path)
    if KEPT and KEPT[0].settings == settings:
        engine = KEPT[0].engine
        if KEPT[0].weights != weights or engine.process.closed:
            with _whole(actor) as folder:
                engine.load(folder)
    else:
        close_engines()
        with _whole(actor) as folder:
            engine = VllmEngine(folder, **settings)
        atexit.register(close_engines)
    KEPT[:] = [Kept(engine, settings, weights)]
    return engine


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


ENGINES: dict[str, Maker] = {"hf": hf, "vllm": vllm, "server": server}


def engine_of(recipe: Recipe, actor: Actor) -> RolloutEngine:
    """The engine that the recipe names, with the actor's weights.

    Raises ConfigError for an unknown name.
    """
    make: Maker = lookup(ENGINES, recipe.rollout.engine, "rollout.engine")
    return make(recipe, actor)


def keeps_answers(recipe: Recipe) -> bool:
    """Whether answers are kept as they come: of engines that may fail, or whose answers differ each time."""
    return recipe.rollout.engine != "hf"


def close_engines() -> None:
    """End the processes of engines; this one's end does it too."""
    while KEPT:
        KEPT.pop().engine.close()


@contextmanager
def _whole(actor: Actor) -> Iterator[str]:
    """A folder with the actor's whole weights: its own, or one made of its adapter and gone afterwards."""
    if not (Path(actor.path) / "adapter_config.json").exists():
        yield actor.path
        return
    with TemporaryDirectory(prefix="rein-") as folder:
        actor.save(Path(folder) / "whole")
        yield str(Path(folder) / "whole")


def _weights(path: str) -> list[tuple[str, int, int]]:
    """What tells one state of a folder's weights from another."""
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(path).glob(kind))
    facts = [(str(file), file.stat()) for file in files]
    return [(name, fact.st_size, fact.st_mtime_ns) for name, fact in facts]
