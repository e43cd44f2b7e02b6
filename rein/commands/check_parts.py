"""What a pass, a probe and decoding take of a process, in bytes, from the sizes of a model.

N positions of a pack, R response tokens of them, V vocabulary entries, H hidden, I of the gated layer. A
number has `size` bytes, inside blocks those of _width(). Part of commands/check.py.
"""

from __future__ import annotations

from dataclasses import replace

from rein.commands.check_packs import Pack
from rein.commands.check_plan import Plan
from rein.commands.check_shapes import Shape
from rein.config.recipe import Recipe

TILE, KEPT = 2**22, 4  # models/head.py: entries of a tile, and of those that are kept in logits_chunk
CHUNK_COPIES = 6  # of a chunk with its gradient: logits, scaled, log-softmax, softmax and gradients, measured
KL_COPIES = 7.25  # of a chunk in functional/log_probs.py exact_kl: seven tensors and a mask
READ_TOKENS = 4096  # engines/slots.py: of prompts that are read at once


def is_cut(recipe: Recipe) -> bool:
    """Whether FSDP2 has the models: over ranks, and on a worker of Ray even where it is alone."""
    return recipe.ranks > 1 or recipe.runtime == "ray"


def trained(recipe: Recipe, shape: Shape) -> int:
    """All parameters, or the adapters'."""
    rank = recipe.model.lora_rank
    return rank * sum(rows + columns for rows, columns in shape.linear) if rank else shape.parameters


def held(recipe: Recipe, shape: Shape, *, shared: bool = False) -> float:
    """Weights (not those of another model), adapters, and the half as wide copies of `fast`.

    Over ranks `fast` has no copies: FSDP2 casts what it gathers.
    """
    own = (0 if shared else shape.parameters) + (trained(recipe, shape) if recipe.model.lora_rank else 0)
    return own * (1.5 if recipe.model.precision == "fast" and not is_cut(recipe) else 1.0)


def trunk(shape: Shape) -> Shape:
    """Of a critic or reward model, whose head is a row, too little to count."""
    return replace(shape, parameters=shape.parameters - shape.head, head=0)


def _width(recipe: Recipe, size: int) -> int:
    """Bytes of a number inside blocks."""
    return 2 if recipe.model.precision == "fast" else size


def activations(
    recipe: Recipe, shape: Shape, pack: Pack, size: int, *, head: bool, exact: bool = False
) -> float:
    """What a pass keeps for its gradient, and what the first steps back take beside it.

    Of a position a block keeps what its steps read again (block_steps.py, attention.py): the inputs of both
    norms and what these give (4 H), turned queries and attention's output, keys and values, the two halves of
    the gated layer. Modules that transformers computes itself, LoRA's among them, keep twice that, measured.
    A checkpointed block keeps its input. Going back, the head and then one gated layer (5 I) are at work.
    """
    tokens = pack.tokens / (recipe.fsdp.ulysses_sequence_parallel_size if recipe.ranks > 1 else 1)
    block = 4 * shape.hidden + 2 * (shape.query + shape.key_value + shape.intermediate)
    if not shape.gated or recipe.model.lora_rank:
        block = 11 * shape.hidden + 4 * (shape.key_value + shape.intermediate)
    kept = shape.layers * block
    if recipe.model.enable_gradient_checkpointing:
        kept = shape.layers * shape.hidden + block
    back = tokens * (5 * shape.intermediate + 2 * shape.hidden) * _width(recipe, size)
    if head:
        back = max(back, _head(recipe, pack.answered * tokens / max(pack.tokens, 1), shape, size, exact))
    return tokens * (kept + 3 * shape.hidden) * _width(recipe, size) + back


def _head(recipe: Recipe, answered: float, shape: Shape, size: int, exact: bool) -> float:
    """Logits [R, V]: by tiles, of which some are kept; with entropy or exact KL by chunks, made again."""
    entries, chunk = answered * shape.vocabulary, recipe.model.logits_chunk
    if exact or recipe.actor.entropy_coeff:
        return min(entries, chunk) * CHUNK_COPIES * (2 if exact else 1) * size
    return (min(entries, KEPT * chunk) + 2 * min(entries, chunk, TILE)) * size


def beside(activations: float, gradients: float, shape: Shape, pack: Pack) -> float:
    """Activations at the moment when they and gradients are most together.

    From the second micro-batch on all gradients are there; in a single one they come as activations go.
    """
    if pack.turns > 1:
        return activations
    return max(activations - gradients, activations / max(shape.layers, 1))


def gathered(recipe: Recipe, shape: Shape, size: int) -> float:
    """What FSDP2 has whole on a rank when it steps back through a block; 0 in one process.

    The ends with their gradients, the block with its gradients, the one gathered ahead, and the buffer that
    its gradients are summed in; going forward the block, those gathered ahead and one more in a buffer.
    """
    if not is_cut(recipe):
        return 0.0
    width, trains = _width(recipe, size), not recipe.model.lora_rank
    back = 2 * width + (width + size if trains else 0)
    forward = (2 + recipe.fsdp.forward_prefetch) * width
    ends = shape.ends * size * (2 if trains else 1)
    return ends + shape.block * min(max(back, forward), shape.layers * (width + size))


def opening(recipe: Recipe, models: list[int], size: int) -> float:
    """Over ranks every rank opens all models whole; the first is cut beside the others."""
    return (sum(models) + max(models) / recipe.ranks) * size if is_cut(recipe) else 0.0


def probe(recipe: Recipe, shape: Shape, pack: Pack, size: int) -> float:
    """Exact KL to the start policy, by chunks, without gradient (over ranks with the ends whole)."""
    chunk = min(pack.answered * shape.vocabulary, recipe.model.logits_chunk, TILE)
    ends = (shape.ends + 2 * shape.block) * size if is_cut(recipe) else 0.0
    return KL_COPIES * chunk * size + pack.tokens * _forward(shape) * _width(recipe, size) + ends


def _forward(shape: Shape) -> int:
    """Numbers of a position amid a block, where nothing is kept."""
    return 4 * shape.hidden + 2 * (shape.query + shape.key_value) + 3 * shape.intermediate


def validating(recipe: Recipe, shape: Shape, plan: Plan, size: int) -> float:
    """Of train: each rank answers its share of the prompts; writing a model takes it whole too."""
    if not recipe.data.holdout_fraction and not recipe.data.val_files:
        return shape.parameters * size if is_cut(recipe) else 0.0
    prompts, room = recipe.trainer.val_prompts, recipe.rollout.max_new_tokens
    if not recipe.data.val_files:
        prompts = min(prompts, plan.held_prompts)
    rows = min(recipe.rollout.batch_size, -(-prompts // recipe.ranks))
    longest = min(plan.longest, plan.mean_prompt + room) if room else plan.longest
    whole = (shape.parameters + shape.block) * size if is_cut(recipe) else 0.0
    return whole + decoding(recipe, shape, plan, rows, longest, size)


def decoding(recipe: Recipe, shape: Shape, plan: Plan, rows: int, longest: float, size: int) -> float:
    """Weights laid out anew (engines/fused.py), keys and values, logits, prompts while they are read."""
    width, layout = _width(recipe, size), 0.0
    if shape.gated:
        of_block = (shape.query + 2 * shape.key_value + 2 * shape.intermediate) * shape.hidden
        layout = shape.layers * of_block * width
    cache = rows * 2 * shape.layers * shape.key_value * longest * width
    read = min(READ_TOKENS, rows * plan.mean_prompt) * _forward(shape) * width
    return layout + cache + max(read, rows * shape.vocabulary * CHUNK_COPIES * size)
