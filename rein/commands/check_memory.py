"""Sizes of models and peak memory of each stage, reckoned from config.json and safetensors headers alone.

B numbers of 4 bytes (float64: 8). Loads no weights. Part of commands/check.py.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rein.commands.check_plan import Plan
from rein.config import paths
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.config.rules import sums_over_vocabulary
from rein.model_files import read_json
from rein.rewards import uses_model
from rein.stages import pipeline

PROCESS = 0.5 * 2**30  # Python, torch and transformers themselves
CHUNK_COPIES = 6  # logits, scaled logits, log-softmax, softmax and gradients, as measured


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. `head`: entries of an untied output layer; `linear`: the blocks' matrices."""

    parameters: int
    hidden: int
    layers: int
    key_value: int
    intermediate: int
    vocabulary: int
    head: int
    linear: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes at a stage's peak."""

    weights: float = 0.0
    gradients: float = 0.0
    adam: float = 0.0
    activations: float = 0.0
    cache: float = 0.0  # keys and values while decoding
    gathered: float = 0.0  # over ranks: what is whole of the weights and gradients while it computes

    @property
    def total(self) -> float:
        # Decoding and a backward pass never are at the same time.
        passing = self.gradients + self.activations + self.gathered
        return PROCESS + self.weights + self.adam + max(passing, self.cache)


def sizes(recipe: Recipe) -> dict[str, Shape | None]:
    """The models of a recipe, on disk or to be made from one that is; None where no size can be read."""
    base = paths.start_policy(recipe, "train")
    named: dict[str, str] = {"actor": base}
    if "critic" in needs(recipe):
        named["critic"] = paths.critic_start(recipe)
    if "reward" in recipe.stages:
        named["reward model"] = paths.reward_trunk(recipe)
    elif uses_model(recipe.score.reward):
        named["reward model"] = paths.reward_model(recipe)
    return {role: read_shape(_origin(recipe, path)) for role, path in named.items()}


def estimate(recipe: Recipe, plans: dict[str, Plan], shapes: dict[str, Shape | None]) -> dict[str, Parts]:
    """Bytes at the peak of each stage whose models' sizes are known."""
    actor, found = shapes.get("actor"), dict[str, Parts]()
    if actor is None:
        return found
    size = 8 if recipe.model.dtype == "float64" else 4
    for stage, plan in plans.items():
        if stage == "sft":
            found[stage] = _supervised(recipe, actor, plan, recipe.sft.batch_size, size, head=True)
        elif stage == "reward":
            shape = shapes.get("reward model") or actor
            found[stage] = _supervised(recipe, shape, plan, recipe.reward.batch_size, size, head=False)
        elif stage == "train":
            found[stage] = _train(recipe, shapes, plan, size)
        elif stage in ("rollout", "evaluate"):
            rows = recipe.rollout.batch_size if stage == "rollout" else recipe.evaluate.batch_size
            found[stage] = Parts(
                weights=actor.parameters * size, cache=_cache(actor, rows, plan.longest, size)
            )
        elif stage == "export":
            found[stage] = Parts(weights=2 * actor.parameters * size)  # it is loaded again and compared
        elif stage == "score" and (reward := shapes.get("reward model")) is not None:
            found[stage] = Parts(weights=_scalar(reward) * size)
        if recipe.ranks > 1 and stage in pipeline.ON_RANKS:
            own = shapes.get("reward model") if stage == "reward" else None
            found[stage] = _of_a_rank(recipe, found[stage], own or actor, size)
    return found


def _of_a_rank(recipe: Recipe, parts: Parts, shape: Shape, size: int) -> Parts:
    """What FSDP2 leaves on each of the ranks: shares of what is trained, whole what computes at the time.

    Whole are the embeddings with the head, and of the blocks the one that computes and those gathered ahead,
    the gradients of the embeddings and of one block, and what the probe and an exact KL keep of the start.
    """
    ends = shape.vocabulary * shape.hidden + shape.head
    block = (shape.parameters - ends) / max(shape.layers, 1)
    whole = ends + min(1 + recipe.fsdp.forward_prefetch, shape.layers) * block
    trained = 0 if recipe.model.lora_rank else ends + block
    decoding = parts.cache / recipe.ranks + shape.parameters * size  # each rank answers its prompts
    kept, fast = 0.0, 1.5 if recipe.model.precision == "fast" else 1.0
    if parts.cache and not recipe.model.lora_rank:
        kept = shape.vocabulary * shape.hidden * size
        kept += shape.parameters * size if sums_over_vocabulary(recipe) else 0.0
    return replace(
        parts,
        weights=(parts.weights - kept) / fast / recipe.ranks + kept,
        gradients=parts.gradients / recipe.ranks,
        adam=parts.adam / recipe.ranks,
        gathered=(whole + trained) * size,
        cache=decoding if parts.cache else 0.0,
    )


def _supervised(recipe: Recipe, shape: Shape, plan: Plan, rows: int, size: int, *, head: bool) -> Parts:
    section = recipe.sft if head else recipe.reward
    trained = _trained(recipe, shape)
    tokens = _tokens(plan, rows, section.ppo_max_token_len_per_gpu)
    return Parts(
        weights=_held(recipe, shape) * size,
        gradients=trained * size,
        adam=2 * trained * size,
        activations=_activations(recipe, shape, tokens, size, head=head),
    )


def _train(recipe: Recipe, shapes: dict[str, Shape | None], plan: Plan, size: int) -> Parts:
    actor, critic, reward = shapes["actor"], shapes.get("critic"), shapes.get("reward model")
    assert actor is not None
    budget = recipe.actor.token_budget
    if not recipe.actor.use_dynamic_bsz:
        budget = (recipe.actor.ppo_micro_batch_size or 1) * plan.longest
    tokens = _tokens(plan, recipe.actor.ppo_mini_batch_size, budget)
    trained = [_trained(recipe, actor)]
    if critic:
        trained.append(_trained(recipe, critic) if recipe.model.lora_rank else _scalar(critic))
    weights, exact = _held(recipe, actor), sums_over_vocabulary(recipe)
    if not recipe.model.lora_rank:
        weights += actor.vocabulary * actor.hidden  # the probe keeps the reference's head
        weights += _held(recipe, actor) if exact else 0  # the reference, frozen
    if critic:
        shared = recipe.critic.model.share_trunk
        weights += _held(recipe, critic, shared=shared) - (0 if shared else critic.head)
    weights += _scalar(reward) if reward else 0
    activations = [_activations(recipe, actor, tokens, size, head=True)]
    if exact:  # and the reference's logits beside the actor's
        activations[0] += min(tokens * actor.vocabulary, recipe.model.logits_chunk) * CHUNK_COPIES * size
    if critic:
        activations.append(_activations(recipe, critic, tokens, size, head=False))
    return Parts(
        weights=weights * size,
        gradients=max(trained) * size,  # one role's at a time
        adam=2 * sum(trained) * size,
        activations=max(activations),
        cache=_cache(actor, recipe.rollout.batch_size, plan.longest, size),
    )


def _tokens(plan: Plan, rows: int, budget: int) -> float:
    """Tokens computed together: the budget, at most a mini-batch's, at least the longest row's."""
    return max(min(budget, rows * plan.mean_tokens), plan.longest)


def _trained(recipe: Recipe, shape: Shape) -> int:
    """All parameters, or the adapters'."""
    rank = recipe.model.lora_rank
    return rank * sum(rows + columns for rows, columns in shape.linear) if rank else shape.parameters


def _held(recipe: Recipe, shape: Shape, *, shared: bool = False) -> float:
    """Weights (not those of another model), adapters, and the half as wide copies of `fast`."""
    own = (0 if shared else shape.parameters) + (_trained(recipe, shape) if recipe.model.lora_rank else 0)
    return own * (1.5 if recipe.model.precision == "fast" else 1.0)


def _scalar(shape: Shape) -> int:
    """Parameters of the trunk with a one-number head."""
    return shape.parameters - shape.head + shape.hidden


def _activations(recipe: Recipe, shape: Shape, tokens: float, size: int, *, head: bool) -> float:
    """What a block keeps for its backward pass; a checkpointed one keeps its input.

    Two norms (3 H each), queries, keys, values and attention's output as packed and as blocks, the
    projection's input, the gated layer's four intermediates; within 10 % of measurements on a 12M model.
    """
    block = 11 * shape.hidden + 4 * shape.key_value + 4 * shape.intermediate
    kept = shape.layers * block
    if recipe.model.enable_gradient_checkpointing:
        kept = shape.layers * shape.hidden + block
    logits = min(tokens * shape.vocabulary, recipe.model.logits_chunk) * CHUNK_COPIES if head else 0
    return (tokens * (kept + 3 * shape.hidden) + logits) * size


def _cache(shape: Shape, rows: int, length: int, size: int) -> float:
    keys_and_values = 2 * shape.layers * shape.key_value * length
    return rows * (keys_and_values + CHUNK_COPIES * shape.vocabulary) * size


def _origin(recipe: Recipe, path: str) -> Path:
    """The folder whose shape a model to be made will have."""
    seen = 0
    while (maker := pipeline.made_by(recipe, path)) and not Path(path).exists() and seen < 3:
        path = paths.reward_trunk(recipe) if maker == "reward" else paths.base_model(recipe)
        seen += 1
    return Path(path).expanduser()


def read_shape(folder: Path) -> Shape | None:
    """The shape of a model folder; None where its configuration or weights cannot be read."""
    adapter = read_json(folder / "adapter_config.json")
    if adapter and not (folder / "config.json").exists():
        return read_shape(Path(str(adapter.get("base_model_name_or_path", ""))))
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    layers = _first(config, "num_hidden_layers", "n_layer")
    tensors = _tensors(folder)
    if not hidden or not layers or not tensors:
        return None
    heads = _first(config, "num_attention_heads", "n_head") or 1
    key_value = (config.get("num_key_value_heads") or heads) * (config.get("head_dim") or hidden // heads)
    # A block's matrices: not the embeddings (first in every model) and not the head.
    linear = [
        s for name, s in tensors.items() if len(s) == 2 and any(part.isdigit() for part in name.split("."))
    ]
    return Shape(
        parameters=sum(_size(shape) for shape in tensors.values()),
        hidden=hidden,
        layers=layers,
        key_value=key_value,
        intermediate=_first(config, "intermediate_size", "n_inner") or 4 * hidden,
        vocabulary=_first(config, "vocab_size") or 0,
        head=_size(tensors.get("lm_head.weight", ())) if "lm_head.weight" in tensors else 0,
        linear=tuple((shape[0], shape[1]) for shape in linear),
    )


def _first(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of the folder's safetensors files (8 bytes of length, then JSON)."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")) if folder.is_dir() else []:
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, 2**27)))
            found |= {name: tuple(e["shape"]) for name, e in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return {}
    return found
