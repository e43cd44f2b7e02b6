"""The updates: backward, apply, discard. Holds actor, critic, their optimizers and the KL coefficients.

Each loss is normalised over the whole mini-batch, so micro-batches and ranks change nothing. Knows no files,
guards or snapshots; its state is plain tensors and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.data.batches import chunks, even_cuts, micro_batches, mini_batch_count, row_batches
from rein.data.mixing import Mixing
from rein.errors import CheckpointError
from rein.functional.kl import EXACT_KINDS, adaptive_kl_coef, moving_average_kl
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.functional.schedules import over_progress
from rein.learner.imitation import Beside, Imitation
from rein.learner.objective import Counts, Objective, PolicyObjective, ValueObjective
from rein.learner.pairs import PairObjective
from rein.models.precision import release_copies
from rein.protocols import Actor, Critic, Mesh, Reference
from rein.runtime.optimizer import Optimizer
from rein.runtime.seeding import derive
from rein.types import Experience, Metrics, Softening, Update


class Learner:
    """One mini-batch at a time: `backward` leaves the weights alone, `apply` moves them, `discard` never."""

    def __init__(
        self,
        recipe: Recipe,
        actor: Actor,
        critic: Critic | None,
        mesh: Mesh,
        *,
        kl_coef_in_loss: float,
        kl_coef_in_reward: float,
        actor_steps: int,
        critic_steps: int,
        demonstrations: Mixing | None = None,
        reference: Reference | None = None,  # for a KL loss over the vocabulary
        longest_group: int = 1,  # most rows of a batch that a mini-batch must hold together
    ) -> None:
        self.longest_group = longest_group
        self.recipe, self.mesh = recipe, mesh
        self.actor, self.critic = actor, critic
        self.imitation = Imitation(recipe, actor, mesh, demonstrations) if demonstrations else None
        self.kl_coef_in_loss, self.kl_coef_in_reward = kl_coef_in_loss, kl_coef_in_reward
        self.soft = Softening()
        self.paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
        exact = recipe.actor.use_kl_loss and recipe.actor.kl_loss_type in EXACT_KINDS
        self.reference = reference if exact else None
        self.objectives = objectives(recipe, actor, critic, self.reference)
        self.kl_average: float | None = None  # of the probe's readings
        self.optimizers = {
            "actor": Optimizer(
                actor.model, recipe.actor.optim, grad_clip=recipe.actor.grad_clip, total_steps=actor_steps
            )
        }
        if critic is not None:
            self.optimizers["critic"] = Optimizer(
                critic.model, recipe.critic.optim, grad_clip=recipe.critic.grad_clip, total_steps=critic_steps
            )
        self._grad_norms: dict[str, float] = {}

    def soften(self, soft: Softening) -> None:
        """Take what remedies have made of rates, coefficients, clips and sizes; from the next update on."""
        self.soft = soft
        for role, optimizer in self.optimizers.items():
            own = self.recipe.actor if role == "actor" else self.recipe.critic
            optimizer.softened = soft.lr if role == "actor" else soft.critic_lr
            optimizer.grad_clip = min(own.grad_clip, soft.grad_clip or own.grad_clip)
        actor = self.objectives["actor"]
        if isinstance(actor, PolicyObjective):
            given = self.recipe.actor.entropy_coeff
            actor.entropy_coeff = given if soft.entropy_coeff is None else soft.entropy_coeff

    def softened(self, kl_coef: float) -> float:
        """A coefficient as remedies leave it; a KL that is off stays off."""
        if not kl_coef:
            return 0.0
        return self.soft.kl_coef * (kl_coef if self.soft.kl_coef_at is None else self.soft.kl_coef_at)

    def updates(self, rows: int, batch: int, together: Sequence[Sequence[int]] | None = None) -> list[Update]:
        """The plan for a batch of `rows`: the critic's epochs, then the actor's, each in its mini-batches.

        A function of the data seed and the batch's number alone, so a resumed run makes the same plan. Rows
        that `together` lists with each other are in one mini-batch; sizes then differ a little.
        """
        plan: list[Update] = []
        for role in ("critic", "actor"):
            if role not in self.optimizers:
                continue
            for epoch in range(self._epochs(role)):
                size, generator = mini_batch_size(self.recipe, role), self._generator(role, batch, epoch)
                if together is None:
                    parts = chunks(self._order(rows, generator), size)
                else:
                    order = self._shuffled(len(together), generator)
                    count = mini_batch_count(rows, size, self.longest_group)
                    parts = even_cuts([together[i] for i in order], count)
                plan += [Update(role, tuple(part), len(plan) + i) for i, part in enumerate(parts)]
        return plan

    def _epochs(self, role: str) -> int:
        more = self.soft.ppo_epochs if role == "actor" else 0  # the critic's come first: its plan stays
        return max(epochs_of(self.recipe, role) + more, 1)

    def _generator(self, role: str, batch: int, epoch: int) -> torch.Generator:
        seed = derive(self.recipe.data_seed, "updates", role, batch, epoch)
        return torch.Generator().manual_seed(seed)

    def _shuffled(self, count: int, generator: torch.Generator) -> list[int]:
        if not self.recipe.actor.shuffle:
            return list(range(count))
        return torch.randperm(count, generator=generator).tolist()

    def _order(self, rows: int, generator: torch.Generator) -> list[int]:
        if self.paired:
            pairs = self._shuffled(rows // 2, generator)
            return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        return self._shuffled(rows, generator)

    def backward(self, update: Update, experience: Experience) -> Metrics:
        """Gradients of one mini-batch over all its micro-batches, and its metrics; weights untouched."""
        objective = self.objectives[update.role]
        rows = torch.tensor(update.rows)
        mask = experience.response_mask[rows]
        counts = Counts(*self.mesh.sum([float(mask.sum()), float(mask.any(1).sum())]))
        parts = self._micro_batches(update, experience)
        objective.prepare(experience, rows, parts)
        beside = Beside(1.0, 0.0, {})
        if self.imitation is not None and update.role == "actor":
            beside = self.imitation.backward(len(rows), counts.tokens, self.token_budget)
        totals: dict[str, float] = {}
        kl_coef = self.softened(self.kl_coef_in_loss)
        for part in parts:
            loss, sums = objective(experience, rows[torch.tensor(part)], counts, kl_coef)
            (beside.share * loss).backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        release_copies(self._role(update.role).model)
        reduced = self.mesh.sum(list(totals.values()))
        metrics = dict(zip(totals, reduced, strict=True))
        if beside.metrics:
            metrics["actor/loss"] = beside.share * metrics["actor/loss"] + beside.loss
            metrics |= beside.metrics
        optimizer = self.optimizers[update.role]
        self._grad_norms[update.role] = metrics[f"{update.role}/grad_norm"] = optimizer.grad_norm()
        metrics[f"{update.role}/lr"] = optimizer.lr
        if update.role == "actor" and self.recipe.actor.use_kl_loss and experience.ref_log_probs is not None:
            metrics["actor/kl_coef"] = kl_coef
        return metrics

    def _role(self, role: str) -> Actor | Critic:
        return self.actor if role == "actor" or self.critic is None else self.critic

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch; a longer row is one by itself."""
        return max(int(self.recipe.actor.token_budget * self.soft.token_budget), 1)

    def _micro_batches(self, update: Update, e: Experience) -> list[list[int]]:
        actor, budget = self.recipe.actor, self.token_budget
        rows = [e.rows[i] for i in update.rows]
        if self.paired:
            lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
            both = [a + b for a, b in zip(lengths[0::2], lengths[1::2], strict=True)]
            pairs = micro_batches(both, budget)
            return [[row for pair in part for row in (2 * pair, 2 * pair + 1)] for part in pairs]
        if actor.use_dynamic_bsz:
            return row_batches(rows, budget, share=self._role(update.role).shares_prompts)
        size = actor.ppo_micro_batch_size or len(rows)
        if update.role == "critic":
            size = self.recipe.critic.ppo_micro_batch_size or size
        return [list(range(i, min(i + size, len(rows)))) for i in range(0, len(rows), size)]

    def apply(self, role: str) -> None:
        """Clip and step this role's optimizer."""
        self.optimizers[role].apply(self._grad_norms[role])
        self._advance(role)

    def discard(self, role: str) -> None:
        """Drop this role's gradients; its schedule advances, and the demonstrations that were beside it."""
        self.optimizers[role].discard()
        self._advance(role)

    def forget(self, role: str) -> None:
        """Drop half-made gradients and advance nothing: the same update is tried again."""
        self.optimizers[role].adam.zero_grad(set_to_none=True)

    def _advance(self, role: str) -> None:
        if role == "actor" and self.imitation is not None:
            self.imitation.advance()

    def control_kl(self, kl: float, rows: int, progress: float) -> None:
        """Move the KL coefficients, once per batch of `rows`.

        `kl` is the latest probe's (NaN: there is none), `progress` the share of the run that is done.
        """
        control = self.recipe.algorithm.kl_ctrl
        if control.type == "schedule" and control.schedule is not None:
            coef = over_progress(progress, control.schedule, shape=control.shape)
            self.kl_coef_in_loss = coef if self.recipe.actor.use_kl_loss else 0.0
            self.kl_coef_in_reward = coef if self.recipe.algorithm.use_kl_in_reward else 0.0
        if control.type == "moving_average":
            self.kl_average = moving_average_kl(self.kl_average, kl, rows=rows, horizon=control.horizon)
            kl = self.kl_average if self.kl_average is not None and math.isfinite(kl) else math.nan
        if control.type in ("adaptive", "moving_average"):
            move = partial(
                adaptive_kl_coef, kl=kl, rows=rows, target_kl=control.target_kl, horizon=control.horizon
            )
            self.kl_coef_in_loss, self.kl_coef_in_reward = (
                move(self.kl_coef_in_loss),
                move(self.kl_coef_in_reward),
            )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a restore needs: weights and moments of each role, steps, the KL controller."""
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {
            "kl_coef_in_loss": self.kl_coef_in_loss,
            "kl_coef_in_reward": self.kl_coef_in_reward,
            "kl_average": self.kl_average,
            "demonstrations": self.imitation.demonstrations.seen if self.imitation else 0,
        }
        for role, optimizer in self.optimizers.items():
            found, meta[role] = optimizer.state()
            tensors |= {f"{role}/{name}": tensor for name, tensor in found.items()}
        return tensors, meta

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Put state() back, whole, or nothing of it. Raises CheckpointError that names what does not fit."""
        if fault := self._fault(tensors, meta):
            raise CheckpointError(f"snapshot: {fault}; resume from another snapshot")
        for role, optimizer in self.optimizers.items():
            optimizer.restore(_of_role(tensors, role), meta[role])
        self.kl_coef_in_loss, self.kl_coef_in_reward = meta["kl_coef_in_loss"], meta["kl_coef_in_reward"]
        self.kl_average = meta["kl_average"]
        if self.imitation is not None:
            self.imitation.demonstrations.seen = meta["demonstrations"]

    def _fault(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
        known = {*self.optimizers, "kl_coef_in_loss", "kl_coef_in_reward", "kl_average", "demonstrations"}
        if missing := sorted(known - set(meta)):
            return f"{missing[0]} is missing"
        strange = [name for name in tensors if name.partition("/")[0] not in self.optimizers]
        if strange := sorted(strange + list(set(meta) - known)):
            return f"{strange[0]} belongs to no role of this run"
        for role, optimizer in self.optimizers.items():
            if fault := optimizer.fault(_of_role(tensors, role), meta[role]):
                return f"{role}/{fault}"
        return ""


def _of_role(tensors: Mapping[str, Tensor], role: str) -> dict[str, Tensor]:
    prefix = f"{role}/"
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def objectives(
    recipe: Recipe, actor: Actor, critic: Critic | None, reference: Reference | None = None
) -> dict[str, Objective]:
    """The losses of the roles; `reference` is there for a KL loss over the vocabulary."""
    paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
    found: dict[str, Objective] = {
        "actor": PairObjective(recipe, actor) if paired else PolicyObjective(recipe, actor, reference)
    }
    if critic is not None:
        found["critic"] = ValueObjective(recipe, critic)
    return found


def mini_batch_size(recipe: Recipe, role: str) -> int:
    """Rows per optimizer step; the critic's follows the actor's unless given."""
    own = recipe.critic.ppo_mini_batch_size if role == "critic" else None
    return own or recipe.actor.ppo_mini_batch_size


def epochs_of(recipe: Recipe, role: str) -> int:
    """Passes over a batch; the critic's follow the actor's unless given."""
    own = recipe.critic.ppo_epochs if role == "critic" else None
    return own or recipe.actor.ppo_epochs


def optimizer_steps(recipe: Recipe, role: str, batches: Mapping[int, int], longest_group: int = 1) -> int:
    """Optimizer steps of a role over so many batches of each size; a short last mini-batch is a step."""
    size = mini_batch_size(recipe, role)
    steps = sum(mini_batch_count(rows, size, longest_group) * count for rows, count in batches.items())
    return steps * epochs_of(recipe, role)
