"""How far stored data is from the actor, from raw weights in float64: nothing here is bounded for a loss.

N weights, usually one per row: w = prod_t old / behavior, in log space. Truncated weights hide the very tail
that these numbers are for, so they are logged beside the applied ones.
"""

import math

import torch
from torch import Tensor

from rein.functional.masked import masked_mean, masked_sum
from rein.functional.statistics import Interval, paired_bootstrap

LOG_MAX = 300.0  # squares of the weights stay finite in float64
TAIL_MIN = 5  # points a tail needs for a fit
RESAMPLES = 1000


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 / N, in (0, 1]; 0 when all N weights are 0 or there is none (Kong 1992)."""
    weights = weights.double()
    total = weights.square().sum()
    return (weights.sum().square() / total / weights.numel()).item() if total > 0 else 0.0


def largest_share(weights: Tensor) -> float:
    """max w / sum w; 0 when all weights are 0."""
    total = weights.double().sum()
    return (weights.double().max() / total).item() if total > 0 else 0.0


def pareto_k(log_w: Tensor) -> float:
    """Shape of a generalised Pareto distribution fitted to the largest weights; NaN where it cannot be.

    Pareto smoothed importance sampling (arXiv:1507.02646): the tail is the largest
    min(0.2 N, 3 sqrt(N)) weights. Below 0.5 the mean has finite variance; above 0.7 do not trust it. Weights
    without spread give 0; a tail of fewer than 5 points has no fit.
    """
    ordered = log_w.double().flatten().sort().values
    n = len(ordered)
    size = math.ceil(min(0.2 * n, 3 * math.sqrt(n)))
    if size < TAIL_MIN:
        return math.nan
    if ordered[-1] - ordered[0] < 1e-9:
        return 0.0
    scaled = (ordered - ordered[-1]).exp()  # a common factor changes no shape
    excess = scaled[-size:] - scaled[-size - 1]
    excess = excess[excess > 0]
    return _shape_of_excess(excess) if len(excess) >= TAIL_MIN else math.nan


def _shape_of_excess(excess: Tensor) -> float:
    """k of the generalised Pareto, [n] ascending: Zhang and Stephens 2009, with the prior of
    arXiv:1507.02646.

    A profile posterior mean of b = -k / sigma over a grid, shrunk towards k = 0.5 by ten points.
    """
    n = len(excess)
    grid = 30 + int(math.sqrt(n))
    index = torch.arange(1, grid + 1, dtype=torch.float64, device=excess.device)
    excess = excess / excess[-1]  # k has no unit
    quartile = excess[int(n / 4 + 0.5) - 1].clamp(min=1e-200)
    b = 1 + (1 - (grid / (index - 0.5)).sqrt()) / (3 * quartile)
    b = b.where(b.abs() > 1e-9, 1e-9)  # at 0 both logarithms vanish and their ratio is the exponential's
    k = torch.log1p(-b[:, None] * excess).mean(1)
    profile = n * ((-b / k).log() - k - 1)
    posterior = torch.softmax(profile, 0)
    mean_b = (b * posterior).sum()
    shape = torch.log1p(-mean_b * excess).mean().item()
    return (n * shape + 10 * 0.5) / (n + 10)


def mean_weight(log_w: Tensor, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, Interval]:
    """Mean of N raw weights and its 95 % bootstrap interval: far below 1, the actor has left what was
    stored."""
    weights = log_w.double().clamp(max=LOG_MAX).exp()
    interval = paired_bootstrap(torch.zeros_like(weights), weights, resamples=resamples, seed=seed)
    return weights.mean().item(), interval


@torch.no_grad()
def staleness(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, float]:
    """Raw weights of tokens (`raw_*`) and of rows (`seq_*`); keys without the prefix `rollout_corr/`.

    Means, effective sample size, the largest weight's share, tails of |log w|, Pareto k of the rows where it
    can be fitted. Rows without a counted token are left out. Nothing counts: no metrics.
    """
    rows = mask.any(1)
    if not rows.any():
        return {}
    log_w = (old_log_probs.double() - behavior_log_probs.double()).where(mask, 0)
    tokens, far = log_w[mask], log_w[mask].abs()
    row_log = masked_sum(log_w, mask, 1)[rows]
    # A common factor cancels in shares and keeps them finite.
    token_weights, row_weights = (tokens - tokens.max()).exp(), (row_log - row_log.max()).exp()
    mean, interval = mean_weight(row_log, resamples=resamples, seed=seed)
    quantiles = torch.quantile(_at_most(far), torch.tensor([0.99, 0.999], dtype=far.dtype, device=far.device))
    found = {
        "raw_mean": tokens.clamp(max=LOG_MAX).exp().mean().item(),
        "raw_max": tokens.max().clamp(max=LOG_MAX).exp().item(),
        "raw_ess": effective_sample_size(token_weights),
        "raw_max_share": largest_share(token_weights),
        "raw_outside_half_to_two": (far > math.log(2)).double().mean().item(),
        "log_weight_p99": quantiles[0].item(),
        "log_weight_p999": quantiles[1].item(),
        "log_weight_max": far.max().item(),
        "seq_ess": effective_sample_size(row_weights),
        "seq_max_share": largest_share(row_weights),
        "seq_mean": mean,
        "seq_mean_low": interval.low,
        "seq_mean_high": interval.high,
        "seq_geometric_mean": masked_mean(log_w, mask).clamp(-LOG_MAX, LOG_MAX).exp().item(),
    }
    shape = pareto_k(row_log)
    return found if math.isnan(shape) else found | {"seq_pareto_k": shape}


def _at_most(values: Tensor, limit: int = 1 << 24) -> Tensor:
    """torch.quantile takes 2^24 values; beyond, evenly spaced ones of the sorted do as well."""
    if len(values) <= limit:
        return values
    return values.sort().values[:: -(-len(values) // limit)]
