"""Peak memory of each stage, reckoned from the sizes of its models and its largest micro-batch.

Numbers have 4 bytes (float64: 8; blocks in `fast`: 2). What is said of train is held against measurements by
benchmarks/memory.py, where the constants that are called measured come from. The formulas of a pass are in
check_parts.py. Part of commands/check.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rein.commands import check_parts as parts
from rein.commands.check_packs import Pack, groups_of_ranks, reckoned_pack
from rein.commands.check_plan import Plan
from rein.commands.check_shapes import Shape
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.config.rules import sums_over_vocabulary
from rein.stages import pipeline

PROCESS = 0.42 * 2**30  # Python, torch and transformers before a model is opened, measured
WORKING = 140 * 2**20  # compiled products (runtime/memory.py) and code first used in a pass, measured
EXCHANGE = 40 * 2**20  # over ranks: gloo's and FSDP2's own, measured
HOLES = 0.3  # of what comes and goes, where freed memory is kept: gaps that it leaves, measured
PROBE_ROWS = 64  # probe.py


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
    """Bytes at the peak of each stage whose models' sizes are known; of one rank where ranks share it.

    Where the processes of a stage are of several kinds each kind has a row: `train: actor`, `train: driver`.
    """
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
            found |= _train(recipe, shapes, plan, size)
        elif stage in ("rollout", "evaluate"):
            rows = recipe.rollout.batch_size if stage == "rollout" else recipe.evaluate.batch_size
            found[stage] = Parts(
                weights=actor.parameters * size,
                decoding=parts.decoding(recipe, actor, plan, rows, plan.longest, size),
            )
        elif stage == "export":
            found[stage] = Parts(weights=2 * actor.parameters * size)  # it is loaded again and compared
        elif stage == "score" and (reward := shapes.get("reward model")) is not None:
            found[stage] = Parts(weights=parts.trunk(reward).parameters * size)
        if stage in pipeline.ON_RANKS and parts.is_cut(recipe):
            for row in [row for row in found if stage_of(row) == stage]:
                found[row] = replace(found[row], exchange=EXCHANGE, kept=False)
            if recipe.runtime == "ray":
                found[f"{stage}: driver"] = _driver(recipe, shapes, stage, size)
    return found


def stage_of(row: str) -> str:
    """Of a row of the estimate."""
    return row.partition(":")[0]


def is_apart(recipe: Recipe) -> bool:
    """Whether the critic has workers of its own, as many as the actor (stages/process.py)."""
    return recipe.critic.placement == "separate" and "critic" in needs(recipe)


def _supervised(recipe: Recipe, shape: Shape, plan: Plan, rows: int, size: int, *, head: bool) -> Parts:
    section = recipe.sft if head else recipe.reward
    trained, ranks = parts.trained(recipe, shape), recipe.ranks
    budget = section.ppo_max_token_len_per_gpu
    pack = reckoned_pack(
        rows, plan.mean_tokens, plan.longest, budget, prompt=plan.mean_prompt, ranks=groups_of_ranks(recipe)
    )
    activations, weights = parts.activations(recipe, shape, pack, size, head=head), parts.held(recipe, shape)
    gradients = trained * size / ranks
    return Parts(
        weights=weights * size / ranks,
        gradients=gradients,
        adam=2 * trained * size / ranks,
        activations=parts.beside(activations, gradients, shape, pack),
        gathered=parts.gathered(recipe, shape, size),
        opening=parts.opening(recipe, [shape.parameters], size),
    )


def _train(recipe: Recipe, shapes: dict[str, Shape | None], plan: Plan, size: int) -> dict[str, Parts]:
    """A row, or one of each role's workers."""
    models = _models(shapes)
    if is_apart(recipe):
        return {f"train: {role}": _trainer(recipe, {role: models[role]}, plan, size) for role in models}
    found, reward = _trainer(recipe, models, plan, size), shapes.get("reward model")
    judge = parts.trunk(reward).parameters * size if reward and recipe.runtime != "ray" else 0
    return {"train": replace(found, weights=found.weights + judge)}


def _models(shapes: dict[str, Shape | None]) -> dict[str, Shape]:
    """What train has of actor and critic."""
    found = {role: shape for role in ("actor", "critic") if (shape := shapes.get(role)) is not None}
    return found | ({"critic": parts.trunk(found["critic"])} if "critic" in found else {})


def _trainer(recipe: Recipe, models: dict[str, Shape], plan: Plan, size: int) -> Parts:
    """Of a process that trains these."""
    ranks, pack, actor = recipe.ranks, plan.pack or _pack_of_means(recipe, plan), models.get("actor")
    exact, shared = sums_over_vocabulary(recipe), recipe.critic.model.share_trunk
    trained = [parts.trained(recipe, shape) for shape in models.values()]
    cut = [parts.held(recipe, shape, shared=shared and role == "critic") for role, shape in models.items()]
    activations = [
        parts.activations(recipe, shape, pack, size, head=role == "actor", exact=exact)
        for role, shape in models.items()
    ]
    gradients = max(trained) * size / ranks  # one role's at a time
    first = actor or models["critic"]
    written = first.parameters * size if parts.is_cut(recipe) else 0.0  # whole, for the model's folder
    return Parts(
        weights=(sum(cut) / ranks + (_frozen(recipe, actor, plan) if actor else 0)) * size,
        gradients=gradients,
        adam=2 * sum(trained) * size / ranks,
        activations=parts.beside(max(activations), gradients, first, pack),
        gathered=max(parts.gathered(recipe, shape, size) for shape in models.values()),
        probe=parts.probe(recipe, actor, pack, size) if actor and recipe.data.holdout_fraction else 0.0,
        decoding=parts.validating(recipe, actor, plan, size) if actor else written,
        opening=parts.opening(recipe, _opened(recipe, models), size),
    )


def _driver(recipe: Recipe, shapes: dict[str, Shape | None], stage: str, size: int) -> Parts:
    """It opens what the workers have, looks, and lets go; the reward model that validation asks stays."""
    actor, reward = shapes["actor"], shapes.get("reward model")
    assert actor is not None
    if stage == "train":
        judge = parts.trunk(reward).parameters if reward else 0
        return Parts(weights=judge * size, opening=sum(_opened(recipe, _models(shapes))) * size, kept=False)
    shape = reward or actor if stage == "reward" else actor
    return Parts(opening=shape.parameters * size, kept=False)


def _opened(recipe: Recipe, models: dict[str, Shape]) -> list[int]:
    """Parameters of all that is whole before any of it is cut, a frozen start policy among it."""
    found = [shape.parameters for shape in models.values()]
    copied = "actor" in models and sums_over_vocabulary(recipe) and not recipe.model.lora_rank
    return [*found, models["actor"].parameters] if copied else found


def _frozen(recipe: Recipe, actor: Shape, plan: Plan) -> float:
    """Numbers that each process keeps of the start policy: for the probe, and an exact KL's reference."""
    states, lora = _probed(plan) * actor.hidden, recipe.model.lora_rank > 0
    own = parts.is_cut(recipe) or not lora  # else the probe reads the actor's head
    head = actor.vocabulary * actor.hidden if own else 0
    return states + head + (parts.held(recipe, actor) if sums_over_vocabulary(recipe) and not lora else 0)


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
