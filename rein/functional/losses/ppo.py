"""The clipped surrogate of PPO with asymmetric clip, dual clip and importance weights: token losses [B, T].

Aggregation is losses/aggregate.py's. Weights are old / behavior, already bounded and detached.
"""

import torch
from torch import Tensor

from rein.functional.losses.result import PolicyLoss as PolicyLoss
from rein.functional.losses.result import clamped, result, weighted
from rein.functional.masked import counted


def ppo_clip(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]  bounded old / behavior
    mask: Tensor | None = None,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never above -c A.

    arXiv:1707.06347, eq. 7; a wider upper clip: arXiv:2503.14476, eq. 10; dual clip: arXiv:1912.09729, eq. 5.

    Raises ValueError for c <= 1.
    """
    if clip_ratio_c <= 1:
        raise ValueError(
            f"clip_ratio_c {clip_ratio_c} must be above 1: it bounds the loss of bad actions from above"
        )
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = clamped(log_probs - old_log_probs)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(unclipped, bounded)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    clipped_lower = negative & (losses > ceiling)
    losses = torch.where(negative, torch.minimum(losses, ceiling), losses)
    return result(weighted(losses, weights, mask), log_ratio, bounded > unclipped, clipped_lower)
