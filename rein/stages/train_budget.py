"""The token budget of `actor.ppo_max_token_len_per_gpu: auto`: timed once, kept in the run's folder.

Small micro-batches fit a CPU's caches, large ones read the weights less often and fill a GPU; which wins
depends on the model and the machine. Part of stages/train.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from rein.config.load import write_json
from rein.config.recipe import Recipe
from rein.data.batches import row_batches
from rein.errors import is_out_of_memory
from rein.experience import temperatures
from rein.model_files import read_json
from rein.models.actor import Actor
from rein.tracking.console import Console
from rein.types import Trajectory

FILE = "token_budget.json"
BUDGETS = (512, 1024, 2048, 4096)
OF_GPU = (4096, 8192, 16384, 32768)
ENOUGH = 60.0  # seconds after which no other budget is tried
NEAR = 1.03  # times the quickest: the smallest budget so near is taken, for it needs the least memory


def with_budget(
    recipe: Recipe, console: Console, actor: Actor, rows: Sequence[Trajectory], folder: Path | None
) -> Recipe:
    """The recipe with a number for `auto`: what an earlier start of this run chose, else timed now."""
    if recipe.actor.ppo_max_token_len_per_gpu != "auto":
        return recipe
    file = None if folder is None else folder / FILE
    known = {} if file is None or recipe.resume == "never" else read_json(file)
    budget, seconds = known.get("tokens"), known.get("seconds_per_1000_tokens", {})
    if not isinstance(budget, int):
        timed = time_budgets(actor, rows)
        budget = quickest(timed)
        seconds = {str(tokens): round(1000 * value, 4) for tokens, value in timed.items()}
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"tokens": budget, "seconds_per_1000_tokens": seconds})
    said = ", ".join(f"{tokens}: {value:.3g} s" for tokens, value in seconds.items())
    console.say(f"actor.ppo_max_token_len_per_gpu: auto -> {budget} (seconds per 1,000 tokens: {said})")
    own = recipe.actor.model_copy(update={"ppo_max_token_len_per_gpu": budget})
    return recipe.model_copy(update={"actor": own})


def time_budgets(actor: Actor, rows: Sequence[Trajectory]) -> dict[int, float]:
    """Seconds per token of the actor's forward and backward pass, by budget; weights untouched."""
    some: list[Trajectory] = []
    tokens = 0
    budgets = BUDGETS if actor.device.type == "cpu" else OF_GPU
    for row in rows:
        more = len(row.prompt_ids) + len(row.response_ids)
        if some and tokens + more > max(budgets):
            break
        some.append(row)
        tokens += more
    found: dict[int, float] = {}
    _pass(actor, some[:1], max(budgets))  # what is made once is not timed
    begin = time.perf_counter()
    for budget in budgets:
        if found and time.perf_counter() - begin > ENOUGH:
            break
        start = time.perf_counter()
        try:
            _pass(actor, some, budget)
        except Exception as error:
            if not found or not is_out_of_memory(error):
                raise
            break  # a larger one needs more still
        found[budget] = (time.perf_counter() - start) / tokens
    actor.model.zero_grad(set_to_none=True)
    return found


def _pass(actor: Actor, rows: Sequence[Trajectory], budget: int) -> None:
    for part in row_batches(rows, budget, share=actor.shares_prompts):
        some = [rows[i] for i in part]
        log_probs, _ = actor.log_probs(some, temperatures(some))
        torch.autograd.backward(log_probs.sum())
    if actor.device.type == "cuda":
        torch.cuda.synchronize()


def quickest(seconds: dict[int, float]) -> int:
    """The smallest budget about as quick as the quickest."""
    return min(tokens for tokens, value in seconds.items() if value <= NEAR * min(seconds.values()))
