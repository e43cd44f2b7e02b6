"""What frozen models say of the rows, once: the reference's log-probs and, where asked, the behavior's.

Both come from the cache that runs share, else from a forward pass that the cache keeps. Part of
stages/train.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from rein.config import paths
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.data.cache import ScoreCache
from rein.data.filters import usable_log_probs
from rein.data.rejects import BadRow
from rein.errors import ConfigError, DataError
from rein.experience import Passes
from rein.models.actor import Actor, load_actor
from rein.models.identity import model_key
from rein.models.place import loading, place_of
from rein.protocols import Tokenizer
from rein.runtime.clock import Clock
from rein.runtime.memory import free_models
from rein.stages.team import shared
from rein.tracking.console import Console
from rein.types import Floats, Trajectory

REFERENCE, BEHAVIOR = "ref_log_probs", "behavior_log_probs"
PHASES = {REFERENCE: "ref", BEHAVIOR: "behavior"}  # the clock's, of the passes themselves
Counts = dict[str, dict[str, int]]  # kind of numbers -> rows from the cache (hits) and computed (misses)


def references(
    recipe: Recipe,
    console: Console,
    actor: Actor,
    passes: Passes,  # of the actor
    rows: list[Trajectory],
    counts: Counts,
    clock: Clock,
) -> dict[str, Floats] | None:
    """Reference log-probs of every row; the actor still is the reference: just loaded, nothing restored."""
    if "reference" not in needs(recipe):
        return None
    cast = shared() and recipe.model.precision == "fast"  # by FSDP2, not into copies: other last digits
    precision = "fast, cast" if cast else recipe.model.precision
    return _said(recipe, console, actor, passes, rows, REFERENCE, precision, counts, clock)


def recomputed(
    recipe: Recipe,
    console: Console,
    tokenizer: Tokenizer,
    rows: list[Trajectory],
    counts: Counts,
    clock: Clock,
) -> list[Trajectory]:
    """The rows with what data.behavior_model gives their responses, where data.behavior is `recomputed`.

    Raises ConfigError for a model with other tokens, DataError for a row that it gives no finite log-prob.
    """
    path = recipe.data.behavior_model
    if path is None or recipe.data.behavior != "recomputed":
        return rows
    where = "data.behavior_model"
    behavior = load_actor(path, precision=recipe.model.precision, where=where, **loading(recipe.model))
    if behavior.tokenizer.get_vocab() != tokenizer.get_vocab():  # type: ignore[attr-defined]
        raise ConfigError(
            f"{where}: {path} has other tokens than the model; give the model that wrote the rows"
        )
    passes, precision = Passes(behavior, None), recipe.model.precision
    found = _said(recipe, console, behavior, passes, rows, BEHAVIOR, precision, counts, clock)
    del behavior
    free_models()
    cut = sum(row.top_p < 1 for row in rows)
    if cut:
        console.say(
            f"data.behavior recomputed: {cut} rows have top_p below 1; what is used is the full softmax"
        )
    return [_with_behavior(row, found[row.key]) for row in rows]


def _with_behavior(row: Trajectory, log_probs: Floats) -> Trajectory:
    try:
        usable = usable_log_probs(np.minimum(log_probs, 0.0), row.response_mask, BEHAVIOR)
    except BadRow as error:
        raise DataError(
            f"{row.where}: recomputed {error.reason}; check data.behavior_model and the row's token ids"
        ) from error
    return dataclasses.replace(row, behavior_log_probs=usable)


def _said(
    recipe: Recipe,
    console: Console,
    model: Actor,
    passes: Passes,
    rows: Sequence[Trajectory],
    kind: str,
    precision: str,  # how the passes compute
    counts: Counts,
    clock: Clock,
) -> dict[str, Floats]:
    what = {REFERENCE: "reference log-probs", BEHAVIOR: "behavior log-probs"}[kind]
    key = model_key(
        model.path,
        dtype=recipe.model.dtype,
        device=place_of(recipe.model).numbers,
        where=what,
        precision=precision,
        compiled=recipe.model.use_torch_compile,
    )
    cache = ScoreCache(paths.cache_dir(recipe), kind, key, {"model": model.path})
    for note in cache.notes:
        console.say(note)
    budget = recipe.actor.token_budget
    missing = len({row.key for row in rows if row.key not in cache})
    computing = partial(clock, PHASES[kind])
    with console.progress(missing, what) if missing else nullcontext(lambda _: None) as advance:
        found = reference_log_probs(rows, passes, cache, budget, advance, computing)
    counts[kind] = cache.counts
    console.say(
        f"{what}: {cache.hits} rows from the cache, {cache.misses} computed ({paths.cache_dir(recipe)})"
    )
    return found


def reference_log_probs(
    rows: Sequence[Trajectory],
    reference: Passes,
    cache: ScoreCache,
    budget: int,
    advance: Callable[[int], None],
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,  # entered for each pass
) -> dict[str, Floats]:
    """What a frozen model gives each response, by row key: from the cache, else by a forward pass, which the
    cache keeps.
    """
    found: dict[str, Floats] = {}
    missing: dict[str, Trajectory] = {}
    for row in rows:
        known = cache.get(row.key)
        if known is None:
            missing[row.key] = row
        else:
            found[row.key] = known
    todo = list(missing.values())
    for begin in range(0, len(todo), 256):
        some = todo[begin : begin + 256]
        with computing():
            log_probs = reference.log_probs(some, budget)
        fresh = {row.key: log_probs[i, : len(row.response_ids)].float().numpy() for i, row in enumerate(some)}
        cache.add(fresh)
        found.update(fresh)
        advance(len(some))
    return found
