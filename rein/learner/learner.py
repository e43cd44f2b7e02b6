"""The updates: backward, apply, discard. Holds actor, critic, their optimizers and the KL coefficients.

Each loss is normalised over the whole mini-batch, so micro-batches and ranks change nothing. Knows no files,
guards or snapshots; its state is plain tensors and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.data.batches import micro_batches
from rein.functional.kl import adaptive_kl_coef
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.learner.objective import Counts, Objective, PolicyObjective, ValueObjective
from rein.learner.pairs import PairObjective
from rein.protocols import Actor, Critic, Mesh
from rein.runtime.optimizer import Optimizer
from rein.runtime.seeding import derive
from rein.types import Experience, Metrics, Update


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
    ) -> None:
        self.recipe, self.mesh = recipe, mesh
        self.actor, self.critic = actor, critic
        self.kl_coef_in_loss, self.kl_coef_in_reward = kl_coef_in_loss, kl_coef_in_reward
        self.paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
        self.objectives = objectives(recipe, actor, critic)
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
        if self.paired:
            pairs = torch.randperm(rows // 2, generator=generator).tolist()
            return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        return torch.randperm(rows, generator=generator).tolist()

    def backward(self, update: Update, experience: Experience) -> Metrics:
        """Gradients of one mini-batch over all its micro-batches, and its metrics; weights untouched."""
        objective = self.objectives[update.role]
        rows = torch.tensor(update.rows)
        mask = experience.response_mask[rows]
        counts = Counts(*self.mesh.sum([float(mask.sum()), float(mask.any(1).sum())]))
        parts = self._micro_batches(update, experience)
        objective.prepare(experience, rows, parts)
        totals: dict[str, float] = {}
        for part in parts:
            loss, sums = objective(experience, rows[torch.tensor(part)], counts, self.kl_coef_in_loss)
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        reduced = self.mesh.sum(list(totals.values()))
        metrics = dict(zip(totals, reduced, strict=True))
        optimizer = self.optimizers[update.role]
        self._grad_norms[update.role] = metrics[f"{update.role}/grad_norm"] = optimizer.grad_norm()
        metrics[f"{update.role}/lr"] = optimizer.lr
        if update.role == "actor" and self.recipe.actor.use_kl_loss and experience.ref_log_probs is not None:
            metrics["actor/kl_coef"] = self.kl_coef_in_loss
        return metrics

    def _micro_batches(self, update: Update, e: Experience) -> list[list[int]]:
        actor = self.recipe.actor
        lengths = [len(e.rows[i].prompt_ids) + len(e.rows[i].response_ids) for i in update.rows]
        if self.paired:
            both = [a + b for a, b in zip(lengths[0::2], lengths[1::2], strict=True)]
            pairs = micro_batches(both, actor.ppo_max_token_len_per_gpu)
            return [[row for pair in part for row in (2 * pair, 2 * pair + 1)] for part in pairs]
        if actor.use_dynamic_bsz:
            return micro_batches(lengths, actor.ppo_max_token_len_per_gpu)
        size = actor.ppo_micro_batch_size or len(lengths)
        if update.role == "critic":
            size = self.recipe.critic.ppo_micro_batch_size or size
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]

    def apply(self, role: str) -> None:
        """Clip and step this role's optimizer."""
        self.optimizers[role].apply(self._grad_norms[role])

    def discard(self, role: str) -> None:
        """Drop this role's gradients; its schedule advances."""
        self.optimizers[role].discard()

    def control_kl(self, kl: float, rows: int) -> None:
        """Move the KL coefficients by the latest probe, once per batch of `rows`."""
        control = self.recipe.algorithm.kl_ctrl
        if control.type == "adaptive":
            move = partial(
                adaptive_kl_coef, kl=kl, rows=rows, target_kl=control.target_kl, horizon=control.horizon
            )
            self.kl_coef_in_loss, self.kl_coef_in_reward = (
                move(self.kl_coef_in_loss),
                move(self.kl_coef_in_reward),
            )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a restore needs: weights and moments of each role, steps, KL coefficients."""
        tensors: dict[str, Tensor] = {}
        meta: dict[str, Any] = {
            "kl_coef_in_loss": self.kl_coef_in_loss,
            "kl_coef_in_reward": self.kl_coef_in_reward,
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


def objectives(recipe: Recipe, actor: Actor, critic: Critic | None) -> dict[str, Objective]:
    """The losses of the roles."""
    paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
    found: dict[str, Objective] = {
        "actor": PairObjective(recipe, actor) if paired else PolicyObjective(recipe, actor)
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


def optimizer_steps(recipe: Recipe, role: str, batch_sizes: Sequence[int]) -> int:
    """Optimizer steps of a role over batches of these sizes; a short last mini-batch is a step."""
    size = mini_batch_size(recipe, role)
    return sum(-(-rows // size) * epochs_of(recipe, role) for rows in batch_sizes)
