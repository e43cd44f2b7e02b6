"""Peak memory of each stage, reckoned from the sizes of its models and its largest micro-batch.

N positions of a pack, R response tokens of them, V vocabulary entries, H hidden. Numbers have 4 bytes
(float64: 8; blocks in `fast`: 2). What is said of train is held against measurements by benchmarks/memory.py,
where the constants that are called measured come from. Part of commands/check.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rein.commands.check_packs import Pack, groups_of_ranks, reckoned_pack
from rein.commands.check_plan import Plan
from rein.commands.check_shapes import Shape
from rein.config.recipe import Recipe
from rein.config.rules import sums_over_vocabulary
from rein.stages import pipeline

PROCESS = 0.42 * 2**30  # Python, torch and transformers before a model is opened, measured
WORKING = 140 * 2**20  # compiled products (runtime/memory.py) and code first used in a pass, measured
EXCHANGE = 40 * 2**20  # over ranks: gloo's and FSDP2's own, measured
HOLES = 0.3  # of what comes and goes, where freed memory is kept: gaps that it leaves, measured
TILE, KEPT = 2**22, 4  # models/head.py: entries of a tile, and of those that are kept in logits_chunk
CHUNK_COPIES = 6  # of a chunk with its gradient: logits, scaled, log-softmax, softmax and gradients, measured
KL_COPIES = 7.25  # of a chunk in functional/log_probs.py exact_kl: seven tensors and a mask
PROBE_ROWS = 64  # probe.py
READ_TOKENS = 4096  # engines/slots.py: of prompts that are read at once


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes at a stage's peak, of one process."""

    weights: float = 0.0
    gradients: float = 0.0
    adam: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0  # over ranks: what is whole of weights and gradients while it computes
    probe: float = 0.0  # an exact KL without gradient
    decoding: float = 0.0  # weights laid out anew, keys and values, over ranks the whole model
    opening: float = 0.0  # over ranks: whole models, before they are cut
    exchange: float = 0.0
    kept: bool = True  # memory that is freed stays the process's, as in one process (runtime/memory.py)

    @property
    def passing(self) -> float:
        """What comes and goes: an update, a probe and decoding never are at the same time.

        Where freed memory is kept, both an update and a probe count: what one leaves in the heap the other's
        tensors, of other sizes, fill badly. With HOLES that is a fit to measurements, which differ from run
        to run by a tenth where single tensors are large.
        """
        update = self.gradients + self.activations + self.gathered
        return max(update + self.probe if self.kept else max(update, self.probe), self.decoding)

    @property
    def holes(self) -> float:
        return HOLES * self.passing if self.kept else 0.0

    @property
    def total(self) -> float:
        held = self.weights + self.adam + self.passing + self.holes
        return PROCESS + max(WORKING + self.exchange + held, self.opening)


def estimate(recipe: Recipe, plans: dict[str, Plan], shapes: dict[str, Shape | None]) -> dict[str, Parts]:
    """Bytes at the peak of each stage whose models' sizes are known; of one rank where ranks share it."""
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
                weights=actor.parameters * size,
                decoding=_decoding(recipe, actor, plan, rows, plan.longest, size),
            )
        elif stage == "export":
            found[stage] = Parts(weights=2 * actor.parameters * size)  # it is loaded again and compared
        elif stage == "score" and (reward := shapes.get("reward model")) is not None:
            found[stage] = Parts(weights=_scalar(reward) * size)
        if stage in found and recipe.ranks > 1 and stage in pipeline.ON_RANKS:
            found[stage] = replace(found[stage], exchange=EXCHANGE, kept=False)
    return found


def _supervised(recipe: Recipe, shape: Shape, plan: Plan, rows: int, size: int, *, head: bool) -> Parts:
    section = recipe.sft if head else recipe.reward
    trained, ranks = _trained(recipe, shape), recipe.ranks
    budget = section.ppo_max_token_len_per_gpu
    pack = reckoned_pack(
        rows, plan.mean_tokens, plan.longest, budget, prompt=plan.mean_prompt, ranks=groups_of_ranks(recipe)
    )
    activations, weights = _activations(recipe, shape, pack, size, head=head), _held(recipe, shape)
    gradients = trained * size / ranks
    return Parts(
        weights=weights * size / ranks,
        gradients=gradients,
        adam=2 * trained * size / ranks,
        activations=_beside(activations, gradients, shape, pack),
        gathered=_gathered(recipe, shape, size),
        opening=_opening(recipe, [shape.parameters], size),
    )


def _train(recipe: Recipe, shapes: dict[str, Shape | None], plan: Plan, size: int) -> Parts:
    actor, critic, reward = shapes["actor"], shapes.get("critic"), shapes.get("reward model")
    assert actor is not None
    ranks, pack = recipe.ranks, plan.pack or _pack_of_means(recipe, plan)
    exact, lora = sums_over_vocabulary(recipe), recipe.model.lora_rank > 0
    shared = recipe.critic.model.share_trunk
    trained = [_trained(recipe, actor)]
    cut, whole = _held(recipe, actor), _probed(plan) * actor.hidden
    activations = [_activations(recipe, actor, pack, size, head=True, exact=exact)]
    opened = [actor.parameters]
    if critic:
        trained.append(_trained(recipe, critic) if lora else _scalar(critic))
        cut += _held(recipe, critic, shared=shared) - (0 if shared else critic.head)
        activations.append(_activations(recipe, critic, pack, size, head=False))
        opened.append(_scalar(critic))
    if not lora:
        whole += actor.vocabulary * actor.hidden  # the probe keeps the start policy's head
        whole += _held(recipe, actor) if exact else 0  # the reference, frozen
    whole += _scalar(reward) if reward else 0
    gradients = max(trained) * size / ranks  # one role's at a time
    return Parts(
        weights=(cut / ranks + whole) * size,
        gradients=gradients,
        adam=2 * sum(trained) * size / ranks,
        activations=_beside(max(activations), gradients, actor, pack),
        gathered=max(_gathered(recipe, shape, size) for shape in (actor, critic) if shape),
        probe=_probe(recipe, actor, pack, size) if recipe.data.holdout_fraction else 0.0,
        decoding=_validating(recipe, actor, plan, size),
        opening=_opening(recipe, opened, size),
    )


def _pack_of_means(recipe: Recipe, plan: Plan) -> Pack:
    """Of train, whose rows are still to be made."""
    actor = recipe.actor
    budget: float = actor.token_budget
    if not actor.use_dynamic_bsz:
        budget = max((actor.ppo_micro_batch_size or 1) * plan.longest, 1)
    mini = max(actor.ppo_mini_batch_size, recipe.critic.ppo_mini_batch_size or 0)
    ranks = groups_of_ranks(recipe)
    return reckoned_pack(mini, plan.mean_tokens, plan.longest, budget, prompt=plan.mean_prompt, ranks=ranks)


def _probed(plan: Plan) -> float:
    """Positions of which the probe keeps the start policy's hidden states."""
    return min(plan.held, PROBE_ROWS) * (plan.mean_tokens - plan.mean_prompt)


def _trained(recipe: Recipe, shape: Shape) -> int:
    """All parameters, or the adapters'."""
    rank = recipe.model.lora_rank
    return rank * sum(rows + columns for rows, columns in shape.linear) if rank else shape.parameters


def _held(recipe: Recipe, shape: Shape, *, shared: bool = False) -> float:
    """Weights (not those of another model), adapters, and the half as wide copies of `fast`.

    Over ranks `fast` has no copies: FSDP2 casts what it gathers.
    """
    own = (0 if shared else shape.parameters) + (_trained(recipe, shape) if recipe.model.lora_rank else 0)
    return own * (1.5 if recipe.model.precision == "fast" and recipe.ranks == 1 else 1.0)


def _scalar(shape: Shape) -> int:
    """Parameters of the trunk with a one-number head."""
    return shape.parameters - shape.head + shape.hidden


def _width(recipe: Recipe, size: int) -> int:
    """Bytes of a number inside blocks."""
    return 2 if recipe.model.precision == "fast" else size


def _activations(
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


def _beside(activations: float, gradients: float, shape: Shape, pack: Pack) -> float:
    """Activations at the moment when they and gradients are most together.

    From the second micro-batch on all gradients are there; in a single one they come as activations go.
    """
    if pack.turns > 1:
        return activations
    return max(activations - gradients, activations / max(shape.layers, 1))


def _gathered(recipe: Recipe, shape: Shape, size: int) -> float:
    """What FSDP2 has whole on a rank when it steps back through a block; 0 in one process.

    The ends with their gradients, the block with its gradients, the one gathered ahead, and the buffer that
    its gradients are summed in; going forward the block, those gathered ahead and one more in a buffer.
    """
    if recipe.ranks == 1:
        return 0.0
    width, trains = _width(recipe, size), not recipe.model.lora_rank
    back = 2 * width + (width + size if trains else 0)
    forward = (2 + recipe.fsdp.forward_prefetch) * width
    ends = shape.ends * size * (2 if trains else 1)
    return ends + shape.block * min(max(back, forward), shape.layers * (width + size))


def _opening(recipe: Recipe, models: list[int], size: int) -> float:
    """Over ranks every rank opens all models whole; the first is cut beside the others."""
    return (sum(models) + max(models) / recipe.ranks) * size if recipe.ranks > 1 else 0.0


def _probe(recipe: Recipe, shape: Shape, pack: Pack, size: int) -> float:
    """Exact KL to the start policy, by chunks, without gradient (over ranks with the ends whole)."""
    chunk = min(pack.answered * shape.vocabulary, recipe.model.logits_chunk, TILE)
    ends = (shape.ends + 2 * shape.block) * size if recipe.ranks > 1 else 0.0
    return KL_COPIES * chunk * size + pack.tokens * _forward(shape) * _width(recipe, size) + ends


def _forward(shape: Shape) -> int:
    """Numbers of a position amid a block, where nothing is kept."""
    return 4 * shape.hidden + 2 * (shape.query + shape.key_value) + 3 * shape.intermediate


def _validating(recipe: Recipe, shape: Shape, plan: Plan, size: int) -> float:
    """Of train: each rank answers its share of the prompts; writing a model takes it whole too."""
    if not recipe.data.holdout_fraction and not recipe.data.val_files:
        return 0.0 if recipe.ranks == 1 else shape.parameters * size
    prompts, room = recipe.trainer.val_prompts, recipe.rollout.max_new_tokens
    if not recipe.data.val_files:
        prompts = min(prompts, plan.held_prompts)
    rows = min(recipe.rollout.batch_size, -(-prompts // recipe.ranks))
    longest = min(plan.longest, plan.mean_prompt + room) if room else plan.longest
    whole = (shape.parameters + shape.block) * size if recipe.ranks > 1 else 0.0
    return whole + _decoding(recipe, shape, plan, rows, longest, size)


def _decoding(recipe: Recipe, shape: Shape, plan: Plan, rows: int, longest: float, size: int) -> float:
    """Weights laid out anew (engines/fused.py), keys and values, logits, prompts while they are read."""
    width, layout = _width(recipe, size), 0.0
    if shape.gated:
        of_block = (shape.query + 2 * shape.key_value + 2 * shape.intermediate) * shape.hidden
        layout = shape.layers * of_block * width
    cache = rows * 2 * shape.layers * shape.key_value * longest * width
    read = min(READ_TOKENS, rows * plan.mean_prompt) * _forward(shape) * width
    return layout + cache + max(read, rows * shape.vocabulary * CHUNK_COPIES * size)
