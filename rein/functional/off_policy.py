"""Importance weights of stored data, rho = old / behavior, and what they say of its distance from the actor.

B rows by T positions; weights are detached. Ratios are old minus behavior in log space: behavior is who wrote
the data, old is the actor at the start of this batch's updates.
"""

import torch
from torch import Tensor

from rein.functional.masked import masked_mean

LOG_RATIO_CLAMP = 20.0


@torch.no_grad()
def token_weights(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    threshold: float,
) -> Tensor:
    """w_t = min(exp(clamp(old - behavior, +-20)), threshold) (truncated IS, Ionides 2008); 0 where masked."""
    log_ratio = (old_log_probs - behavior_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return log_ratio.exp().clamp(max=threshold).where(mask, 0)


@torch.no_grad()
def diagnostics(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    threshold: float,
) -> dict[str, float]:
    """Raw weights in float64, before any bound: mean, largest, share above the bound, effective sample size.

    ESS = (sum w)^2 / sum w^2 over rows, as a share of the rows; 0 when all weights are 0.
    """
    log_ratio = (old_log_probs.double() - behavior_log_probs.double()).where(mask, 0)
    weights = log_ratio.exp()
    row_log = log_ratio.sum(1)
    # A common factor cancels in the ESS and keeps it finite.
    row = (row_log - row_log.max()).exp()
    square = row.square().sum()
    ess = (row.sum().square() / square / len(row)).item() if square > 0 else 0.0
    return {
        "rollout_corr/rollout_is_mean": masked_mean(weights, mask).item(),
        "rollout_corr/rollout_is_max": weights.where(mask, 0).max().item(),
        "rollout_corr/rollout_is_ratio_fraction_high": masked_mean(
            (weights > threshold).double(), mask
        ).item(),
        "rollout_corr/seq_ess": ess,
        "rollout_corr/kl": -masked_mean(log_ratio, mask).item(),
    }
