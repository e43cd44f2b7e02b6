"""CISPO: the ratio is clipped and detached, so every token keeps a gradient."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, clamped, result, weighted
from rein.functional.masked import counted


def cispo(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (arXiv:2506.13585, eq. 4 and 5)."""
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = clamped(log_probs - old_log_probs)
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = -bounded * advantages * log_probs
    return result(weighted(losses, weights, mask), log_ratio, ratio != bounded)
