"""The loss of one micro-batch: rows of an Experience and a model in, a scalar and sums of metrics out.

Every sum is divided by the whole mini-batch's counts, so that micro-batches add up to it. The losses are
functional/'s; which one, and its options, is the recipe's word. Applies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.functional.kl import OFF_POLICY, kl_penalty, off_policy_kl
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.bypass import bypass
from rein.functional.losses.m2po import m2po_mask
from rein.functional.losses.opsm import opsm_mask
from rein.functional.losses.result import PolicyLoss
from rein.functional.losses.table import LOSSES
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_sum
from rein.protocols import Actor, Critic, Mesh, Reference
from rein.types import Experience, Metrics, Trajectory

Losses = tuple[Tensor, Metrics]
Turn = tuple[Sequence[int], bool]  # a micro-batch of this rank, and whether it counts


class Counts(NamedTuple):
    """What a mini-batch's losses are divided by, summed over all its micro-batches and ranks."""

    tokens: float
    rows: float  # with a counted token


class Objective(Protocol):
    """The loss of one micro-batch."""

    def prepare(self, e: Experience, rows: Tensor, turns: Sequence[Turn], mesh: Mesh) -> None:
        """See a whole mini-batch before its first micro-batch; parts of `turns` are positions in `rows`."""
        ...

    def __call__(self, e: Experience, index: Tensor, counts: Counts, kl_coef: float) -> Losses:
        """`kl_coef`: of the KL loss, where there is one."""
        ...


class PolicyObjective:
    """The policy loss of the recipe, plus the KL loss, minus the entropy bonus."""

    def __init__(self, recipe: Recipe, actor: Actor, reference: Reference | None = None) -> None:
        self.recipe, self.actor, self.reference = recipe, actor, reference
        self.mode = recipe.actor.policy_loss.loss_mode
        self.against = LOSSES[self.mode].against
        self.options = loss_options(recipe)
        self.entropy_coeff = recipe.actor.entropy_coeff
        self._kept: Tensor | None = None  # m2po: by row of the experience

    def prepare(self, e: Experience, rows: Tensor, turns: Sequence[Turn], mesh: Mesh) -> None:
        """m2po's mask is made from the whole mini-batch."""
        if self.mode != "m2po":
            return
        assert e.behavior_log_probs is not None
        now = torch.zeros_like(e.old_log_probs)
        with torch.no_grad():
            for part, counted in turns:
                index = rows[torch.tensor(part)]
                found, _ = self.actor.log_probs([e.rows[i] for i in index.tolist()], e.temperature[index])
                if counted:
                    now[index, : found.shape[1]] = found
        mesh.add(now)
        mask = torch.zeros_like(e.response_mask)
        mask[rows] = e.response_mask[rows]
        threshold = self.recipe.actor.policy_loss.m2po_threshold
        self._kept = m2po_mask(now, e.behavior_log_probs, mask, threshold=threshold)

    def __call__(self, e: Experience, index: Tensor, counts: Counts, kl_coef: float) -> Losses:
        """The actor's loss of the rows at `index`."""
        actor = self.recipe.actor
        log_probs, entropy, exact = self._log_probs([e.rows[i] for i in index.tolist()], e.temperature[index])
        width = log_probs.shape[1]
        mask = e.response_mask[index, :width]
        longest = self.recipe.data.max_response_length

        def stored(values: Tensor) -> Tensor:
            # 0 where nothing counts: what may stand there would turn the gradient into 0 * nan.
            return values[index, :width].where(mask, 0)

        def whole(values: Tensor) -> Tensor:
            return aggregate(
                values, mask, actor.loss_agg_mode, tokens=counts.tokens, rows=counts.rows, scale=longest
            )

        def mean(values: Tensor) -> float:
            return masked_sum(values.detach().double(), mask).item() / max(counts.tokens, 1)

        found, left = self._policy_loss(e, index, log_probs, mask)
        loss = policy = whole(found.losses)
        metrics = {
            "actor/pg_loss": policy.item(),
            "actor/pg_clipfrac": mean(found.clipped),
            "actor/pg_clipfrac_lower": mean(found.clipped_lower),
            "actor/ppo_kl": mean(stored(e.old_log_probs) - log_probs),
            "actor/ratio_mean": mean((log_probs.detach() - stored(e.old_log_probs)).clamp(-20, 20).exp()),
            "actor/rejected": mean(mask & ~left),
        }
        if e.behavior_log_probs is not None:
            moved = off_policy_kl(log_probs.detach(), stored(e.old_log_probs), stored(e.behavior_log_probs))
            metrics["kl/old"] = mean(moved)
        if actor.use_kl_loss and e.ref_log_probs is not None:
            behavior = None if e.behavior_log_probs is None else stored(e.behavior_log_probs)
            kind = actor.kl_loss_type or ("k3_soft" if behavior is None else OFF_POLICY)
            kl = kl_penalty(
                log_probs, stored(e.ref_log_probs), kind, exact=exact, behavior_log_probs=behavior
            )
            loss = loss + kl_coef * whole(kl)
            metrics["actor/kl_loss"] = mean(kl)
        if entropy is not None:
            loss = loss - self.entropy_coeff * whole(entropy)
            metrics["actor/entropy"] = mean(entropy)
        metrics["actor/loss"] = loss.item()
        return loss, metrics

    def _log_probs(
        self, rows: Sequence[Trajectory], temperature: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs, entropy where it is paid for, and the exact KL where the KL loss is of that kind."""
        entropy = self.entropy_coeff != 0
        if self.reference is None:
            return *self.actor.log_probs(rows, temperature, entropy=entropy), None
        return self.actor.log_probs_and_kl(rows, temperature, self.reference, entropy=entropy)

    def _policy_loss(
        self, e: Experience, index: Tensor, log_probs: Tensor, mask: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        """Token losses over what rejection leaves of the mask, and what it leaves."""
        width = log_probs.shape[1]
        correction = self.recipe.algorithm.rollout_correction
        advantages = e.advantages[index, :width].where(mask, 0)
        behavior = None
        if e.behavior_log_probs is not None:
            behavior = e.behavior_log_probs[index, :width].where(mask, 0)
        if correction.bypass_mode:
            assert behavior is not None
            return self._bypass(log_probs, behavior, advantages, mask)
        sources = {"old": e.old_log_probs, "behavior": behavior, "reference": e.ref_log_probs}
        denominator = sources[self.against]
        assert denominator is not None
        denominator = denominator if self.against == "behavior" else denominator[index, :width].where(mask, 0)
        weights = None if e.rollout_is_weights is None else e.rollout_is_weights[index, :width].where(mask, 0)
        left = mask if e.loss_mask is None else e.loss_mask[index, :width] & mask
        threshold = self.recipe.actor.policy_loss.opsm_threshold
        if threshold is not None and behavior is not None:
            left = opsm_mask(log_probs.detach(), behavior, advantages, left, threshold=threshold)
        options: dict[str, Any] = dict(self.options)
        if self._kept is not None:
            options["kept"] = self._kept[index, :width]
        found = LOSSES[self.mode].compute(log_probs, denominator, advantages, weights, left, **options)
        return found, left

    def _bypass(
        self, log_probs: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[PolicyLoss, Tensor]:
        wanted = self.recipe.algorithm.rollout_correction
        found, corrected = bypass(
            log_probs,
            behavior,
            advantages,
            mask,
            loss_type=wanted.loss_type,
            rollout_is=None if wanted.rollout_is == "auto" else wanted.rollout_is,
            rollout_is_threshold=wanted.rollout_is_threshold,
            rollout_rs=wanted.rollout_rs,
            rollout_rs_threshold=wanted.rollout_rs_threshold,
            **loss_options(self.recipe),
        )
        return found, corrected.mask


class ValueObjective:
    """The clipped value loss."""

    def __init__(self, recipe: Recipe, critic: Critic) -> None:
        self.recipe, self.critic = recipe, critic

    def prepare(self, e: Experience, rows: Tensor, turns: Sequence[Turn], mesh: Mesh) -> None:
        """Nothing of the whole mini-batch is needed."""

    def __call__(self, e: Experience, index: Tensor, counts: Counts, kl_coef: float) -> Losses:
        """The critic's loss of the rows at `index`."""
        assert e.returns is not None
        values = self.critic.values([e.rows[i] for i in index.tolist()])
        width = values.shape[1]
        mask = e.response_mask[index, :width]
        old = None if e.values is None else e.values[index, :width].where(mask, 0)
        returns = e.returns[index, :width].where(mask, 0)
        clip = self.recipe.critic.cliprange_value
        losses, clipped = value_loss(values, old, returns, cliprange_value=clip)
        loss = aggregate(losses, mask, "token-mean", tokens=counts.tokens, rows=counts.rows)
        return loss, {
            "critic/vf_loss": loss.item(),
            "critic/vf_clipfrac": masked_sum(clipped.double(), mask).item() / max(counts.tokens, 1),
            "critic/vpred_mean": masked_sum(values.detach().double(), mask).item() / max(counts.tokens, 1),
        }


def loss_options(recipe: Recipe) -> dict[str, Any]:
    """The keywords of the recipe's policy loss, from the keys that bear their names."""
    actor, own = recipe.actor, recipe.actor.policy_loss
    clip = {
        "clip_ratio_low": actor.clip_ratio_low or actor.clip_ratio,
        "clip_ratio_high": actor.clip_ratio_high or actor.clip_ratio,
        "clip_ratio_c": actor.clip_ratio_c,
    }
    options = {
        "sapo": {"tau_pos": own.tau_pos, "tau_neg": own.tau_neg},
        "dro": {"beta": own.dro_beta or 0.0},  # the recipe's rules see to it that it is given
        "topr": {"ratio_max": own.topr_ratio_max},
        "awr": {"beta": own.awr_beta, "weight_max": own.awr_weight_max},
        "sppo": {"eta": own.sppo_eta},
    }
    needed = {name: clip[name] for name in LOSSES[own.loss_mode].options if name in clip}
    return needed | options.get(own.loss_mode, {})
