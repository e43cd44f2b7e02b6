"""The updates: backward, apply, discard. Holds actor, critic, their optimizers and the KL coefficients.

Each loss is normalised over the whole mini-batch, so micro-batches and ranks change nothing. Knows no files,
guards or snapshots; its state is plain tensors and JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.data.batches import micro_batches, row_batches, turns_of
from rein.data.mixing import Mixing
from rein.errors import CheckpointError
from rein.functional.kl import EXACT_KINDS
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.learner.imitation import Beside, Imitation
from rein.learner.objective import Counts, Objective, PolicyObjective, ValueObjective
from rein.learner.pairs import PairObjective
from rein.learner.plan import Plan
from rein.models.precision import release_copies
from rein.protocols import Actor, Critic, Mesh, Reference
from rein.runtime.optimizer import Optimizer
from rein.types import Experience, Metrics, Softening, Update


class Learner(Plan):
    """One mini-batch at a time: `backward` leaves the weights alone, `apply` moves them, `discard` never."""

    def __init__(
        self,
        recipe: Recipe,
        actor: Actor | None,  # None: its updates are made elsewhere
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
        super().__init__(
            recipe,
            [role for role, model in (("critic", critic), ("actor", actor)) if model is not None],
            kl_coef_in_loss=kl_coef_in_loss,
            kl_coef_in_reward=kl_coef_in_reward,
            longest_group=longest_group,
        )
        self.mesh = mesh
        self.actor, self.critic = actor, critic
        models = {"actor": actor, "critic": critic}
        self.models = {role: model for role, model in models.items() if model is not None}
        self.imitation = None
        if demonstrations and actor is not None:
            self.imitation = Imitation(recipe, actor, mesh, demonstrations)
        exact = recipe.actor.use_kl_loss and recipe.actor.kl_loss_type in EXACT_KINDS
        self.reference = reference if exact else None
        self.objectives = objectives(recipe, actor, critic, self.reference)
        steps = {"actor": actor_steps, "critic": critic_steps}
        self.optimizers = {
            role: Optimizer(
                model.model,
                (own := recipe.actor if role == "actor" else recipe.critic).optim,
                grad_clip=own.grad_clip,
                total_steps=steps[role],
            )
            for role, model in self.models.items()
        }
        self._grad_norms: dict[str, float] = {}

    def soften(self, soft: Softening) -> None:
        """Take what remedies have made of rates, coefficients, clips and sizes; from the next update on."""
        self.soft = soft
        for role, optimizer in self.optimizers.items():
            own = self.recipe.actor if role == "actor" else self.recipe.critic
            optimizer.softened = soft.lr if role == "actor" else soft.critic_lr
            optimizer.grad_clip = min(own.grad_clip, soft.grad_clip or own.grad_clip)
        actor = self.objectives.get("actor")
        if isinstance(actor, PolicyObjective):
            given = self.recipe.actor.entropy_coeff
            actor.entropy_coeff = given if soft.entropy_coeff is None else soft.entropy_coeff

    def backward(self, update: Update, experience: Experience) -> Metrics:
        """Gradients of one mini-batch over all its micro-batches, and its metrics; weights untouched."""
        objective = self.objectives[update.role]
        rows = torch.tensor(update.rows)
        mask = experience.response_mask[rows]
        counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
        parts = self._micro_batches(update, experience)
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in experience.rows]
        turns = turns_of(parts, [lengths[i] for i in update.rows], self.mesh)
        objective.prepare(experience, rows, turns, self.mesh)
        beside = Beside(1.0, 0.0, {})
        if self.imitation is not None and update.role == "actor":
            beside = self.imitation.backward(len(rows), counts.tokens, self.token_budget)
        totals: dict[str, float] = {}
        kl_coef = self.softened(self.kl_coef_in_loss)
        for part, counted in turns:
            loss, sums = objective(experience, rows[torch.tensor(part)], counts, kl_coef)
            (beside.share * loss if counted else 0 * loss).backward()  # type: ignore[no-untyped-call]
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + (value if counted else 0.0)
        release_copies(self.models[update.role].model)
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

    def _micro_batches(self, update: Update, e: Experience) -> list[list[int]]:
        actor, budget = self.recipe.actor, self.token_budget
        rows = [e.rows[i] for i in update.rows]
        if self.paired:
            lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
            both = [a + b for a, b in zip(lengths[0::2], lengths[1::2], strict=True)]
            pairs = micro_batches(both, budget)
            return [[row for pair in part for row in (2 * pair, 2 * pair + 1)] for part in pairs]
        if actor.use_dynamic_bsz:
            share = self.models[update.role].shares_prompts
            return row_batches(rows, budget, share=share, ranks=self.mesh.world_size)
        size = actor.ppo_micro_batch_size or len(rows)
        if update.role == "critic":
            size = self.recipe.critic.ppo_micro_batch_size or size
        return [list(range(i, min(i + size, len(rows)))) for i in range(0, len(rows), size)]

    def apply(self, role: str) -> None:
        """Clip and step this role's optimizer."""
        self.optimizers[role].apply(self._grad_norms[role])
        self._advance(role)

    def discard(self, role: str, rows: int | None = None) -> None:
        """Drop this role's gradients; its schedule advances, and the demonstrations that were beside it.

        `rows`: of a mini-batch that was never computed.
        """
        self.optimizers[role].discard()
        self._advance(role, rows)

    def forget(self, role: str) -> None:
        """Drop half-made gradients and advance nothing: the same update is tried again."""
        self.optimizers[role].adam.zero_grad(set_to_none=True)

    def shorten(self, role: str, steps: int) -> None:
        """So many steps of a role's schedule will not be made."""
        self.optimizers[role].total_steps -= steps

    def _advance(self, role: str, rows: int | None = None) -> None:
        if role == "actor" and self.imitation is not None:
            self.imitation.advance(rows)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a restore needs: weights and moments of each role, steps, the KL controller."""
        tensors: dict[str, Tensor] = {}
        for role, optimizer in self.optimizers.items():
            found, _ = optimizer.state()
            tensors |= {f"{role}/{name}": tensor for name, tensor in found.items()}
        return tensors, self.meta()

    def meta(self) -> dict[str, Any]:
        """The part of state() that is JSON."""
        seen = self.imitation.demonstrations.seen if self.imitation else 0
        steps = {role: optimizer.state()[1] for role, optimizer in self.optimizers.items()}
        return self.coefficients() | {"demonstrations": seen} | steps

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Put state() back, whole, or nothing of it. Raises CheckpointError that names what does not fit."""
        if fault := self._fault(tensors, meta):
            raise CheckpointError(f"snapshot: {fault}; resume from another snapshot")
        for role, optimizer in self.optimizers.items():
            optimizer.restore(_of_role(tensors, role), meta[role])
        self.take(meta)
        if self.imitation is not None:
            self.imitation.demonstrations.seen = meta["demonstrations"]

    def _fault(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
        known = {*self.optimizers, *self.coefficients(), "demonstrations"}
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
    recipe: Recipe, actor: Actor | None, critic: Critic | None, reference: Reference | None = None
) -> dict[str, Objective]:
    """The losses of the roles; `reference` is there for a KL loss over the vocabulary."""
    paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
    found: dict[str, Objective] = {}
    if actor is not None:
        found["actor"] = PairObjective(recipe, actor) if paired else PolicyObjective(recipe, actor, reference)
    if critic is not None:
        found["critic"] = ValueObjective(recipe, critic)
    return found
