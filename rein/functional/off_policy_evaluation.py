"""What a policy would score, from answers that another one gave: estimators, intervals, and when to believe.

B rows by T positions; w_t = actor / behavior at token t, raw, and w_{a:b} the product from a to b. All in
float64. Every estimator is the mean over prompts of the mean over their rows of one number per row, so that
one interval, clustered by prompt, serves all. They are unbiased (the scaled and the self-normalised one up
to a term of order 1/n, the clipped one not at all) only with exact log-probs and where the behavior
policy gives every answer of the actor some probability: `trust` says what can be seen of that.
Knows nothing of models or files.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.cross_fitting import cross_fitted_values, remaining_weights, token_features
from rein.functional.masked import masked_sum
from rein.functional.staleness import LOG_MAX, effective_sample_size, pareto_k

ESS_LEAST = 50.0  # rows
PARETO_MOST = 0.7
Z95 = 1.959963984540054
Z99 = 2.5758293035489004


class Estimate(NamedTuple):
    """An expected score and its 95 % interval."""

    value: float
    low: float
    high: float


class Trust(NamedTuple):
    """Whether the estimates of a policy may be believed, and what that is judged by."""

    trusted: bool
    ess: float  # of the products, in rows
    pareto_k: float  # of the reported estimator's terms; NaN where too few rows are there to tell
    products_k: float  # of the products, for those who normalise by them
    mean_weight: Estimate  # of the products, with its 99 % interval: 1 where nothing is wrong
    reasons: tuple[str, ...]  # why not


@torch.no_grad()
def log_ratios(
    actor_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
) -> Tensor:
    """log w_t, [B, T], float64; 0 at positions that do not count."""
    return (actor_log_probs.double() - behavior_log_probs.double()).where(mask, 0)


def product_weights(log_w: Tensor) -> Tensor:
    """w_{0:t} at each t, [B, T]."""
    return log_w.cumsum(1).clamp(max=LOG_MAX).exp()


@torch.no_grad()
def importance_sampling(
    log_w: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    gamma: float = 1.0,
    most: float = math.inf,
) -> Tensor:
    """min(w_{0:T}, most) sum_t gamma^t r_t, [B]: the product of the whole row (Precup et al. 2000, eq. 3).

    `most` clips the product: less spread, and too low wherever it cuts (Ionides 2008 takes sqrt(B)).
    """
    total = masked_sum(rewards.double() * _discounts(mask, gamma), mask, 1)
    return log_w.sum(1).clamp(max=LOG_MAX).exp().clamp(max=most) * total


@torch.no_grad()
def per_decision(
    log_w: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    gamma: float = 1.0,
) -> Tensor:
    """sum_t gamma^t w_{0:t} r_t, [B] (Precup et al. 2000, eq. 5).

    A token is weighed by what led to it, not by what came after. Rewards at the last token only: the product
    of the whole row.
    """
    return masked_sum(product_weights(log_w) * rewards.double() * _discounts(mask, gamma), mask, 1)


@torch.no_grad()
def with_control_variate(
    log_w: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]  V(s_t), read before token t is chosen; must not have seen this row
    mask: Tensor,  # [B, T]
    *,
    gamma: float = 1.0,
) -> Tensor:
    """V(t) = V(s_t) + w_t (r_t + gamma V(t+1) - V(s_t)) -> V(0), [B]; V after the last token is 0.

    Per-decision importance sampling with V as control variate: w_t has mean 1, so V(s_t) (1 - w_t) has mean
    0 whatever V is, and the nearer V is to the actor's value, the less is left to vary. The form of the
    doubly robust estimator (Jiang and Li 2016, arXiv:1511.03722, eq. 10; Thomas and Brunskill 2016,
    arXiv:1604.00923) with V(s_t) in the place of Q(s_t, a_t): with wrong log-probs it is as wrong as they
    are, so it is not doubly robust.
    """
    weights, rewards, values = log_w.clamp(max=LOG_MAX).exp(), rewards.double(), values.double()
    following = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for t in reversed(range(values.shape[1])):
        found = values[:, t] + weights[:, t] * (rewards[:, t] + gamma * following - values[:, t])
        following = torch.where(mask[:, t], found, following)
    return following


@torch.no_grad()
def self_normalised(
    log_w: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    groups: Tensor,  # [B]  number of the row's prompt
    *,
    gamma: float = 1.0,
) -> Tensor:
    """m = mean(w G) / mean(w) as the mean of m + w (G - m) / mean(w), [B]: w = w_{0:T}, G = the row's return.

    Never larger than the largest stored score, and blind to it where the actor has left what is stored: of a
    policy gone elsewhere it reports the few rows that it still knows. The spread of the rows is that of the
    ratio to first order (Hesterberg 1995, section 4).
    """
    summed = log_w.sum(1)
    w = (summed - summed.max()).exp()  # a common factor cancels, and keeps it finite
    total = masked_sum(rewards.double() * _discounts(mask, gamma), mask, 1)
    mean_w = by_prompt(w, groups).mean()
    mean = by_prompt(w * total, groups).mean() / mean_w
    return mean + w * (total - mean) / mean_w


@torch.no_grad()
def row_estimates(
    log_w: Tensor,  # [B, T]
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    groups: Tensor,  # [B]
    values: Tensor | None = None,  # [B, T]  of a critic trained on other prompts, where there is one
) -> dict[str, Tensor]:
    """Every estimator's number of each row, [B], by name; `control_variate` is the one to report.

    Its V is refitted to these rows, prompts apart, weighed towards the actor, and scaled: see `scaled`.
    """
    rewards = rewards.double().where(mask, 0)
    returns = rewards.flip(1).cumsum(1).flip(1)
    features = token_features(rewards.sum(1), mask, groups, values)
    fitted = cross_fitted_values(features, returns, mask, groups, remaining_weights(log_w))
    plain, varied = per_decision(log_w, rewards, mask), with_control_variate(log_w, rewards, fitted, mask)
    return {
        "control_variate": scaled(plain, varied),
        "per_decision": plain,
        "importance_sampling": importance_sampling(log_w, rewards, mask),
        "clipped": importance_sampling(log_w, rewards, mask, most=math.sqrt(len(mask))),
        "self_normalised": self_normalised(log_w, rewards, mask, groups),
    }


def scaled(plain: Tensor, varied: Tensor) -> Tensor:
    """plain + b (varied - plain), [B]: the estimator with b V for V, b in [0, 1] of least variance.

    The difference c has mean 0, so b = -E[plain c] / E[c^2] (Owen 2013, section 8.9), from the same rows: a
    bias of order 1 / B, for never being wider than without V. Where V would be multiplied by a single heavy
    weight, b is near 0.
    """
    control = varied - plain
    spread = control.square().mean()
    if spread == 0:
        return plain
    b = -((plain - plain.mean()) * control).mean() / spread
    return plain + b.clamp(0, 1) * control


def by_prompt(rows: Tensor, groups: Tensor) -> Tensor:
    """Mean of each prompt's rows, [P]."""
    index = torch.unique(groups, return_inverse=True)[1]
    sums = torch.zeros(int(index.max()) + 1, dtype=torch.float64, device=rows.device)
    counts = torch.zeros_like(sums).index_add_(0, index, torch.ones_like(rows, dtype=torch.float64))
    return sums.index_add_(0, index, rows.double()) / counts


def clustered(rows: Tensor, groups: Tensor, *, z: float = Z95) -> Estimate:
    """Mean over prompts and its interval, Student's on the means of prompts: answers to one prompt are alike.

    A single prompt has no spread to tell from: its interval is without end.
    """
    means = by_prompt(rows, groups)
    n, mean = len(means), means.mean().item()
    half = student(n - 1, z) * means.std().item() / math.sqrt(n) if n > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def with_missing(found: Estimate, mean_weight: float, least: float) -> Estimate:
    """The control variate's interval, its low end moved down by (1 - mean weight) (value - least).

    A mean product below 1 is what the sample lacks of the actor's answers, and V speaks for them; they may as
    well score the least there is. Plain importance sampling counts them as 0 by itself.
    """
    lacking = max(0.0, 1 - mean_weight) * max(0.0, found.value - least)
    return found._replace(low=found.low - lacking)


def student(freedom: int, z: float = Z95) -> float:
    """Student's quantile where the normal one is z, by an expansion in 1 / freedom.

    Abramowitz and Stegun (1964), 26.7.5: within 0.001 from 5 degrees of freedom on, at 95 %.
    """
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4


def trust(log_w: Tensor, terms: Tensor, groups: Tensor) -> Trust:
    """Whether the products of the rows, log w [B, T], carry the mean of an estimator's terms, [B].

    Refused where the products' effective sample size (Kong 1992) is below 50 rows; where the terms' tail is
    too heavy for a mean, Pareto k above 0.7 (Vehtari et al. 2024, arXiv:1507.02646); and where the products'
    mean is not 1: the actor has left what is stored, or these are not the log-probs it was stored with. The
    tail is that of what is averaged: an answer that scores 0 may have any weight.
    """
    summed = log_w.sum(1)
    weights = (summed - summed.max()).exp()
    ess, shape = effective_sample_size(weights) * len(weights), _tail(terms)
    mean = clustered(summed.clamp(max=LOG_MAX).exp(), groups, z=Z99)
    reasons = []
    if ess < ESS_LEAST:
        reasons.append(f"the products are worth {ess:.3g} rows, {ESS_LEAST:g} are needed")
    if shape > PARETO_MOST:
        reasons.append(f"Pareto k of the terms is {shape:.2f}, above {PARETO_MOST:g}")
    if not mean.low <= 1 <= mean.high:
        reasons.append(f"the mean product is {mean.value:.3g} ({mean.low:.3g} to {mean.high:.3g}), not 1")
    return Trust(not reasons, ess, shape, pareto_k(summed), mean, tuple(reasons))


def _tail(terms: Tensor) -> float:
    """Pareto k of |terms|; 0 where the largest tenth is equal but for rounding, which has its own tail."""
    logs = terms.double().abs().log()
    most = logs.topk(-(-len(logs) // 10)).values
    return 0.0 if most[0] - most[-1] < 1e-3 else pareto_k(logs)


def _discounts(mask: Tensor, gamma: float) -> Tensor:
    """gamma^t, t counting the tokens that count before this one, [B, T]."""
    return gamma ** (mask.double().cumsum(1) - mask.double())
