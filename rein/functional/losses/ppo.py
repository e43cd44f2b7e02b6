"""The clipped surrogate of PPO with asymmetric clip, dual clip and importance weights: token losses [B, T].

Aggregation is losses/aggregate.py's. Weights are old / behavior, already bounded and detached.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0


class PolicyLoss(NamedTuple):
    """Token losses and, per token, what is logged of them; all [B, T]."""

    losses: Tensor
    clipped: Tensor  # the clip bounds the loss here
    clipped_lower: Tensor  # the dual clip bounds it here
    log_ratio: Tensor


def ppo_clip(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]  bounded old / behavior
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 never above -c A.

    arXiv:1707.06347, eq. 7; dual clip: arXiv:1912.09729, eq. 5.

    Raises ValueError for c <= 1.
    """
    if clip_ratio_c <= 1:
        raise ValueError(
            f"clip_ratio_c {clip_ratio_c} must be above 1: it bounds the loss of bad actions from above"
        )
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(unclipped, bounded)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    clipped_lower = negative & (losses > ceiling)
    losses = torch.where(negative, torch.minimum(losses, ceiling), losses)
    if weights is not None:
        losses = losses * weights
    return PolicyLoss(losses, (bounded > unclipped).detach(), clipped_lower.detach(), log_ratio.detach())
