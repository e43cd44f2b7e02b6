"""Importance weights of stored data, rho = old / behavior, at tokens or of whole responses, and their bounds.

B rows by T positions; weights are detached. Ratios are old minus behavior in log space: behavior is who wrote
the data, old is the actor at the start of this batch's updates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.masked import LOG_RATIO_CLAMP, counted, masked_mean, masked_sum
from rein.functional.presets import LEVELS, weight_bounds


class Weights(NamedTuple):
    """What multiplies the losses, and what it was before any bound."""

    applied: Tensor  # [B, T]  0 where masked
    bounded: Tensor  # [B, T]  before batch normalisation
    raw: Tensor  # [B, T]  exp of the log-ratio clamped at 20; 0 where masked
    factor: float | None  # the mean that batch normalisation divided by


@torch.no_grad()
def log_weights(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    level: str,
) -> Tensor:
    """log w at each token, [B, T]: its own log-ratio, or its row's sum (sequence) or mean (geometric).

    token: biased in the state distribution, low variance. sequence: unbiased, variance grows with length.
    geometric: the row's mean ratio per token, free of length, unbiased for nothing. 0 where masked for token.
    """
    if level not in LEVELS:
        raise ValueError(f"rollout_is: {level!r} is unknown; known: {', '.join(LEVELS)}")
    old_log_probs, behavior_log_probs = counted(mask, old_log_probs, behavior_log_probs)
    log_ratio = old_log_probs - behavior_log_probs
    if level == "token":
        return log_ratio
    reduce = masked_sum if level == "sequence" else masked_mean
    return reduce(log_ratio, mask, 1).unsqueeze(1).expand_as(log_ratio)


@torch.no_grad()
def importance_weights(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    level: str,
    threshold: float | str,
    batch_normalize: bool = False,
) -> Weights:
    """w = exp(clamp(log w, +-20)), then min(w, u) for `u`, or 0 outside [lo, hi] for `"lo_hi"`; 0 where
    masked.

    Truncation: Ionides 2008; the two-sided form: IcePop. Batch normalisation divides by the mean weight of
    counted tokens (token), or of rows with one (sequence, geometric), unless that is 0.
    """
    low, high = weight_bounds(threshold)
    raw = log_weights(old_log_probs, behavior_log_probs, mask, level)
    raw = raw.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp().where(mask, 0)
    bounded = raw.clamp(max=high) if low is None else raw.where((raw >= low) & (raw <= high), 0)
    if not batch_normalize:
        return Weights(bounded, bounded, raw, None)
    per_row = masked_mean(bounded, mask, 1)
    mean = masked_mean(bounded, mask) if level == "token" else masked_mean(per_row, mask.any(1))
    factor = mean.item() if mean > 1e-8 else 1.0
    return Weights(bounded / factor, bounded, raw, factor)
