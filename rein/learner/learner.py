"""The updates: backward, apply, discard. Holds actor, critic, their optimizers and the KL coefficients.

Each loss is normalised over the whole mini-batch, so micro-batches and ranks change nothing. Knows no files,
guards or snapshots; its state is plain tensors and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rein.config.methods import Method
from rein.config.recipe import Recipe
from rein.data.batches import micro_batches
from rein.data.mixing import Mixing
from rein.functional.kl import EXACT_KINDS, adaptive_kl_coef, kl_penalty, moving_average_kl
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.imitation import negative_log_likelihood
from rein.functional.losses.ppo import PolicyLoss, ppo_clip
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_sum
from rein.functional.schedules import over_progress
from rein.learner.imitation import Beside, Imitation
from rein.protocols import Actor, Critic, Mesh, Reference
from rein.runtime.optimizer import Optimizer
from rein.runtime.seeding import derive
from rein.types import Experience, Metrics, Trajectory, Update

TokenLoss = Callable[
    [Tensor, Tensor, Tensor, Tensor | None], PolicyLoss
]  # log_probs, old, advantages, weights


def _ppo_clip(recipe: Recipe) -> TokenLoss:
    actor = recipe.actor
    return partial(
        ppo_clip,
        clip_ratio_low=actor.clip_ratio_low or actor.clip_ratio,
        clip_ratio_high=actor.clip_ratio_high or actor.clip_ratio,
        clip_ratio_c=actor.clip_ratio_c,
    )


def _nll(recipe: Recipe) -> TokenLoss:
    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor | None) -> PolicyLoss:
        never = torch.zeros_like(log_probs, dtype=torch.bool)
        return PolicyLoss(negative_log_likelihood(log_probs), never, never, (log_probs - old).detach())

    return loss


POLICY_LOSSES: dict[str, Callable[[Recipe], TokenLoss]] = {"ppo_clip": _ppo_clip, "nll": _nll}


class Learner:
    """One mini-batch at a time: `backward` leaves the weights alone, `apply` moves them, `discard` never."""

    def __init__(
        self,
        recipe: Recipe,
        method: Method,
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
    ) -> None:
        self.recipe, self.method, self.mesh = recipe, method, mesh
        self.actor, self.critic = actor, critic
        self.imitation = Imitation(recipe, actor, mesh, demonstrations) if demonstrations else None
        exact = recipe.actor.use_kl_loss and recipe.actor.kl_loss_type in EXACT_KINDS
        self.reference = reference if exact else None
        self.kl_coef_in_loss, self.kl_coef_in_reward = kl_coef_in_loss, kl_coef_in_reward
        self.kl_average: float | None = None  # of the probe's readings
        self.policy_loss = POLICY_LOSSES[method.loss_mode](recipe)
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

    def updates(self, rows: int, batch: int) -> list[Update]:
        """The plan for a batch of `rows`: the critic's epochs, then the actor's, each in its mini-batches.

        A function of the seed and the batch's number alone, so a resumed run makes the same plan.
        """
        plan: list[Update] = []
        for role in ("critic", "actor"):
            if role not in self.optimizers:
                continue
            for epoch in range(epochs_of(self.recipe, role)):
                order = self._order(rows, role, batch, epoch)
                size = mini_batch_size(self.recipe, role)
                for begin in range(0, rows, size):
                    plan.append(Update(role, tuple(order[begin : begin + size]), len(plan)))
        return plan

    def _order(self, rows: int, role: str, batch: int, epoch: int) -> list[int]:
        if not self.recipe.actor.shuffle:
            return list(range(rows))
        generator = torch.Generator().manual_seed(derive(self.recipe.seed, "updates", role, batch, epoch))
        return torch.randperm(rows, generator=generator).tolist()

    def backward(self, update: Update, experience: Experience) -> Metrics:
        """Gradients of one mini-batch over all its micro-batches, and its metrics; weights untouched."""
        compute = self._actor_loss if update.role == "actor" else self._critic_loss
        rows = torch.tensor(update.rows)
        mask = experience.response_mask[rows]
        tokens, counted = self.mesh.sum([float(mask.sum()), float(mask.any(1).sum())])
        beside = Beside(1.0, 0.0, {})
        if self.imitation is not None and update.role == "actor":
            beside = self.imitation.backward(len(rows), tokens)
        totals: dict[str, float] = {}
        for part in self._micro_batches(update, experience):
            loss, sums = compute(experience, rows[torch.tensor(part)], tokens, counted)
            (beside.share * loss).backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        reduced = self.mesh.sum(list(totals.values()))
        metrics = dict(zip(totals, reduced, strict=True))
        if beside.metrics:
            metrics["actor/loss"] = beside.share * metrics["actor/loss"] + beside.loss
            metrics |= beside.metrics
        optimizer = self.optimizers[update.role]
        self._grad_norms[update.role] = metrics[f"{update.role}/grad_norm"] = optimizer.grad_norm()
        metrics[f"{update.role}/lr"] = optimizer.lr
        if update.role == "actor" and self.recipe.actor.use_kl_loss and experience.ref_log_probs is not None:
            metrics["actor/kl_coef"] = self.kl_coef_in_loss
        return metrics

    def _micro_batches(self, update: Update, e: Experience) -> list[list[int]]:
        actor = self.recipe.actor
        lengths = [len(e.rows[i].prompt_ids) + len(e.rows[i].response_ids) for i in update.rows]
        if actor.use_dynamic_bsz:
            return micro_batches(lengths, actor.ppo_max_token_len_per_gpu)
        size = actor.ppo_micro_batch_size or len(lengths)
        if update.role == "critic":
            size = self.recipe.critic.ppo_micro_batch_size or size
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]

    def _actor_loss(
        self, e: Experience, index: Tensor, tokens: float, counted: float
    ) -> tuple[Tensor, Metrics]:
        actor = self.recipe.actor
        rows = [e.rows[i] for i in index.tolist()]
        log_probs, entropy, exact = self._log_probs(rows, e.temperature[index])
        width = log_probs.shape[1]
        mask = e.response_mask[index, :width]
        longest = self.recipe.data.max_response_length

        def stored(values: Tensor) -> Tensor:
            # 0 where nothing counts: what may stand there would turn the gradient into 0 * nan.
            return values[index, :width].where(mask, 0)

        def whole(values: Tensor) -> Tensor:
            return aggregate(values, mask, actor.loss_agg_mode, tokens=tokens, rows=counted, scale=longest)

        def mean(values: Tensor) -> float:
            return masked_sum(values.detach().double(), mask).item() / max(tokens, 1)

        weights = None if e.rollout_is_weights is None else stored(e.rollout_is_weights)
        found = self.policy_loss(log_probs, stored(e.old_log_probs), stored(e.advantages), weights)
        loss = policy = whole(found.losses)
        metrics = {
            "actor/pg_loss": policy.item(),
            "actor/pg_clipfrac": mean(found.clipped),
            "actor/pg_clipfrac_lower": mean(found.clipped_lower),
            "actor/ppo_kl": -mean(found.log_ratio),
        }
        if actor.use_kl_loss and e.ref_log_probs is not None:
            kl = kl_penalty(log_probs, stored(e.ref_log_probs), actor.kl_loss_type, exact=exact)
            loss = loss + self.kl_coef_in_loss * whole(kl)
            metrics["actor/kl_loss"] = mean(kl)
        if entropy is not None:
            loss = loss - actor.entropy_coeff * whole(entropy)
            metrics["actor/entropy"] = mean(entropy)
        metrics["actor/loss"] = loss.item()
        return loss, metrics

    def _log_probs(
        self, rows: Sequence[Trajectory], temperature: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropy where it is paid for, and the exact KL where the KL loss is of that kind."""
        entropy = self.recipe.actor.entropy_coeff != 0
        if self.reference is None:
            return *self.actor.log_probs(rows, temperature, entropy=entropy), None
        return self.actor.log_probs_and_kl(rows, temperature, self.reference, entropy=entropy)

    def _critic_loss(
        self, e: Experience, index: Tensor, tokens: float, counted: float
    ) -> tuple[Tensor, Metrics]:
        assert self.critic is not None
        assert e.returns is not None
        values = self.critic.values([e.rows[i] for i in index.tolist()])
        width = values.shape[1]
        mask = e.response_mask[index, :width]
        old = None if e.values is None else e.values[index, :width].where(mask, 0)
        returns = e.returns[index, :width].where(mask, 0)
        clip = self.recipe.critic.cliprange_value
        losses, clipped = value_loss(values, old, returns, cliprange_value=clip)
        loss = aggregate(losses, mask, "token-mean", tokens=tokens, rows=counted)
        return loss, {
            "critic/vf_loss": loss.item(),
            "critic/vf_clipfrac": masked_sum(clipped.double(), mask).item() / max(tokens, 1),
            "critic/vpred_mean": masked_sum(values.detach().double(), mask).item() / max(tokens, 1),
        }

    def apply(self, role: str) -> None:
        """Clip and step this role's optimizer."""
        self.optimizers[role].apply(self._grad_norms[role])
        self._advance(role)

    def discard(self, role: str) -> None:
        """Drop this role's gradients; its schedule advances, and the demonstrations that were beside it."""
        self.optimizers[role].discard()
        self._advance(role)

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
        """Put state() back, whole. Raises CheckpointError when a part is missing."""
        for role, optimizer in self.optimizers.items():
            prefix = f"{role}/"
            own = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            optimizer.restore(own, meta[role])
        self.kl_coef_in_loss, self.kl_coef_in_reward = meta["kl_coef_in_loss"], meta["kl_coef_in_reward"]
        self.kl_average = meta["kl_average"]
        if self.imitation is not None:
            self.imitation.demonstrations.seen = meta["demonstrations"]


def mini_batch_size(recipe: Recipe, role: str) -> int:
    """Rows per optimizer step; the critic's follows the actor's unless given."""
    own = recipe.critic.ppo_mini_batch_size if role == "critic" else None
    return own or recipe.actor.ppo_mini_batch_size


def epochs_of(recipe: Recipe, role: str) -> int:
    """Passes over a batch; the critic's follow the actor's unless given."""
    own = recipe.critic.ppo_epochs if role == "critic" else None
    return own or recipe.actor.ppo_epochs


def optimizer_steps(recipe: Recipe, role: str, batch_sizes: Sequence[int]) -> int:
    """Optimizer steps of a role over batches of these sizes; a short last mini-batch is a step."""
    size = mini_batch_size(recipe, role)
    return sum(-(-rows // size) * epochs_of(recipe, role) for rows in batch_sizes)
