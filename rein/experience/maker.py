"""Stored rows + models -> Experience: log-probs, values, token-level rewards, advantages. Orchestration only.

The maths is functional/'s, the forward passes are the models'. What the frozen reference says of a row is
passed in by row key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.errors import DataError
from rein.experience.passes import Passes, padded, temperatures
from rein.functional.advantages import (
    ESTIMATORS,
    INPUTS,
    WHITENED,
    discounted_returns,
    trace_kept,
)
from rein.functional.kl import EXACT_KINDS, off_policy_kl
from rein.functional.masked import masked_mean, whiten
from rein.functional.off_policy import correct, diagnostics
from rein.functional.presets import weight_bounds
from rein.functional.rewards import shape_scores, subtract_kl
from rein.functional.statistics import explained_variance
from rein.protocols import Actor, Critic, Reference
from rein.rewards.shaping import Shaped, shape
from rein.runtime.clock import Clock
from rein.types import Experience, Floats, Metrics, Softening, Trajectory


class ExperienceMaker:
    """Turns a batch of rows into an Experience with the actor and critic as they are now."""

    def __init__(
        self,
        recipe: Recipe,
        actor: Actor,
        critic: Critic | None,
        references: Mapping[str, Floats] | None,
        *,
        corrected: bool,  # weigh by old / behavior
        statistics: tuple[float, float] | None = None,  # mean and std of the training rows' scores
        reference: Reference | None = None,  # for a KL over the vocabulary
        passes: Passes | None = None,  # where they are made; here, unless given
    ) -> None:
        self.recipe = recipe
        self.actor, self.critic, self.references = actor, critic, references
        self.corrected = corrected
        self.statistics, self.reference = statistics, reference
        self.passes = passes or Passes(actor, critic, reference)
        self.token_budget = recipe.actor.token_budget
        self.reward_manager = recipe.reward_manager
        self.between: Callable[[], None] = lambda: None  # called between the passes of a batch
        self.clock = Clock()

    def soften(self, soft: Softening) -> None:
        """Take what remedies have made of the token budget and the reward clip; from the next batch on."""
        given = self.recipe.actor.token_budget
        self.token_budget = max(int(given * soft.token_budget), 1)
        self.reward_manager = self.recipe.reward_manager
        if soft.reward_clip is not None:
            low, high = soft.reward_clip
            own = self.reward_manager.clip_range or (low, high)
            ends = max(low, own[0]), min(high, own[1])
            ends = ends if ends[0] < ends[1] else own
            self.reward_manager = self.reward_manager.model_copy(update={"clip_range": ends})

    def make(self, rows: list[Trajectory], kl_coef_in_reward: float) -> Experience:
        """Score, weigh and estimate one batch.

        Raises DataError for a row to which the actor gives a log-prob that is not finite.
        """
        mask = padded([row.response_mask for row in rows], torch.bool)
        with self.clock("old_log_prob"):
            old = self.passes.log_probs(rows, self.token_budget)
        self._finite(rows, old, mask)
        self.between()
        experience = Experience(
            rows=rows,
            response_mask=mask,
            temperature=temperatures(rows),
            old_log_probs=old,
            advantages=torch.zeros_like(old),
        )
        if self.references is not None:
            experience.ref_log_probs = padded([self.references[row.key] for row in rows], old.dtype)
        if all(row.behavior_log_probs is not None for row in rows):
            experience.behavior_log_probs = padded([row.behavior_log_probs for row in rows], old.dtype)  # type: ignore[misc]
        with self.clock("adv"):
            self._weigh(experience)
            self._estimate(experience, self._rewards(experience, kl_coef_in_reward))
        return experience

    def scores(self, rows: Sequence[Trajectory]) -> Shaped:
        """Scores shaped and placed on tokens, [B, T]: what the critic is fitted to before PPO."""
        mask = padded([row.response_mask for row in rows], torch.bool)
        longest = self.recipe.data.max_response_length
        return shape(rows, mask, self.reward_manager, max_length=longest, statistics=self.statistics)

    def stored_returns(self, rows: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
        """Monte-Carlo returns of the shaped stored scores, and the mask, [B, T] each."""
        mask = padded([row.response_mask for row in rows], torch.bool)
        scores = self.scores(rows).token_level_scores
        return discounted_returns(scores, mask, gamma=self.recipe.algorithm.gamma), mask

    def _finite(self, rows: list[Trajectory], log_probs: Tensor, mask: Tensor) -> None:
        bad = (~torch.isfinite(log_probs) & mask).any(1).nonzero()
        if len(bad):
            raise DataError(
                f"{rows[int(bad[0])].where}: the actor gives this row a log-prob that is not finite; "
                "check the model's weights and the row's token ids"
            )

    def _weigh(self, e: Experience) -> None:
        if e.behavior_log_probs is not None:
            e.metrics |= diagnostics(e.old_log_probs, e.behavior_log_probs, e.response_mask)
            gap = (e.old_log_probs - e.behavior_log_probs).abs().where(e.response_mask, 0)
            e.metrics["training/log_prob_diff_max"] = gap.max().item()
            if self.corrected:
                self._correct(e, e.behavior_log_probs)
            moved = off_policy_kl(e.old_log_probs, e.behavior_log_probs, e.behavior_log_probs)
            e.metrics["kl/behavior"] = masked_mean(moved, e.response_mask).item()
        if e.ref_log_probs is not None and e.behavior_log_probs is not None:
            raw = off_policy_kl(e.old_log_probs, e.ref_log_probs, e.behavior_log_probs)
            e.metrics["kl/reference"] = masked_mean(raw, e.response_mask).item()
            e.metrics["kl/reference_capped"] = masked_mean(raw.clamp(max=10), e.response_mask).item()

    def _correct(self, e: Experience, behavior: Tensor) -> None:
        wanted = self.recipe.algorithm.rollout_correction
        if wanted.bypass_mode:  # the loss weighs by the actor as it is at each step
            return
        found = correct(
            e.old_log_probs,
            behavior,
            e.response_mask,
            rollout_is="token" if wanted.rollout_is == "auto" else wanted.rollout_is,
            rollout_is_threshold=wanted.rollout_is_threshold,
            rollout_is_batch_normalize=wanted.rollout_is_batch_normalize,
            rollout_rs=wanted.rollout_rs,
            rollout_rs_threshold=wanted.rollout_rs_threshold,
        )
        e.rollout_is_weights = found.weights
        e.loss_mask = found.mask if wanted.rollout_rs is not None else None
        e.metrics |= found.metrics

    def _rewards(self, e: Experience, kl_coef: float) -> Tensor:
        if any(row.score is None for row in e.rows):  # rows that are imitated need none
            return torch.zeros_like(e.old_log_probs)
        scores, said = self.scores(e.rows)
        e.metrics |= said | mean_max_min("critic/score", scores.sum(1))
        e.metrics["critic/score/median"] = scores.sum(1).median().item()
        e.metrics["response_length/mean"] = e.response_mask.sum(1).double().mean().item()
        if self.recipe.algorithm.use_kl_in_reward and e.ref_log_probs is not None:
            scores, kl = subtract_kl(
                scores,
                e.old_log_probs,
                e.ref_log_probs,
                e.response_mask,
                kl_coef=kl_coef,
                kind=self.recipe.algorithm.kl_penalty,
                exact=self._exact_kl(e),
            )
            e.metrics["actor/reward_kl_penalty"] = masked_mean(kl, e.response_mask).item()
            e.metrics["actor/reward_kl_penalty_coeff"] = kl_coef
        e.metrics |= mean_max_min("critic/rewards", scores.sum(1))
        return scores

    def _exact_kl(self, e: Experience) -> Tensor | None:
        """KL(actor || reference) over the vocabulary, [B, T], where the KL in the reward is of that kind."""
        if self.reference is None or self.recipe.algorithm.kl_penalty not in EXACT_KINDS:
            return None
        with self.clock("ref"):
            return self.passes.exact_kl(e.rows, self.token_budget)

    def _estimate(self, e: Experience, rewards: Tensor) -> None:
        name = self.recipe.algorithm.adv_estimator
        if name is None:
            return
        if self.critic is not None:
            with self.clock("values"):
                e.values = self.passes.values(e.rows, self.token_budget)
            self.between()
        known: dict[str, Tensor | None] = {
            "token_level_rewards": rewards,
            "response_mask": e.response_mask,
            "values": e.values,
            "bootstrap_values": torch.zeros(len(e.rows)),  # a scored row is terminal however it ended
            "old_log_probs": e.old_log_probs,
            "behavior_log_probs": e.behavior_log_probs,
            "groups": group_numbers(e.rows),
            "baseline_scores": self._baselines(e.rows),
        }
        advantages, returns = ESTIMATORS[name](*(known[key] for key in INPUTS[name]), **self._options(name))
        e.advantages = whiten(advantages, e.response_mask) if name in WHITENED else advantages
        counted = e.advantages[e.response_mask]
        if counted.numel():
            e.metrics |= mean_max_min("critic/advantages", counted)
        if e.values is not None:
            e.returns = returns
            e.metrics |= value_metrics(e.values, returns, e.response_mask)
        if name == "vtrace" and e.behavior_log_probs is not None:
            kept = trace_kept(e.old_log_probs, e.behavior_log_probs, e.response_mask)
            e.metrics["rollout_corr/trace_kept"] = kept

    def _options(self, name: str) -> dict[str, float | bool]:
        """The keywords of an estimator."""
        algorithm = self.recipe.algorithm
        gamma, lam = algorithm.gamma, algorithm.lam
        _, bound = weight_bounds(algorithm.rollout_correction.rollout_is_threshold)
        keywords: dict[str, dict[str, float | bool]] = {
            "gae": {"gamma": gamma, "lam": lam},
            "vtrace": {"gamma": gamma, "lam": lam, "threshold": bound},
            "monte_carlo": {"gamma": gamma},
            "reinforce_plus_plus": {"gamma": gamma},
            "grpo": {"by_std": algorithm.norm_adv_by_std_in_grpo},
        }
        return keywords.get(name, {})

    def _baselines(self, rows: Sequence[Trajectory]) -> Tensor | None:
        """The greedy answers' scores, [B], normalised and clipped as scores are; None if one is missing."""
        if any(row.baseline_score is None for row in rows):
            return None
        scores = torch.tensor([float(row.baseline_score or 0.0) for row in rows])
        clip = self.reward_manager.clip_range
        return shape_scores(scores, statistics=self.statistics, clip_range=clip)


def group_numbers(rows: Sequence[Trajectory]) -> Tensor:
    """A number per prompt, [B] long: rows that answer the same prompt share it.

    A row of which nothing counts is no measure for the others: it has its own.
    """
    numbers: dict[str | int, int] = {}
    keys = [row.group if row.response_mask.any() else place for place, row in enumerate(rows)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def mean_max_min(name: str, values: Tensor) -> Metrics:
    """Mean, max and min under `name`, as verl logs them."""
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{which}": value.item() for which, value in found.items()}


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> Metrics:
    """1 - var(R - V) / var(R), the mean value and the mean return over counted tokens."""
    return {
        "critic/vf_explained_var": float(explained_variance(values, returns, mask)),
        "critic/values/mean": masked_mean(values, mask).item(),
        "critic/returns/mean": masked_mean(returns, mask).item(),
    }
