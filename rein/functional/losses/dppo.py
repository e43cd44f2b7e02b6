"""DPPO: a token that has already moved too far in the wanted direction is left out; distance is measured in
probability (total variation) or in the KL of "this token or another"."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, clamped, result, weighted
from rein.functional.masked import counted

EPSILON = 1e-8


def dppo_tv(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """-sg(min(r, c)) A log pi where p - p_old <= high (A > 0) or >= -low (A <= 0), 0 elsewhere.

    arXiv:2602.04879, binary total variation, as in verl 0.9.1.
    """
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    gap = log_probs.detach().exp() - old_log_probs.exp()
    kept = (gap <= clip_ratio_high).where(advantages > 0, gap >= -clip_ratio_low)
    return _kept_surrogate(log_probs, old_log_probs, advantages, weights, mask, kept, clip_ratio_c)


def dppo_kl(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """As dppo_tv, the distance being KL(p_old || p) of "this token or another", on the side A points to.

    q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = p_old; arXiv:2602.04879, binary KL, as in verl 0.9.1.
    """
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    x = log_probs.detach()
    p, q = x.exp(), old_log_probs.exp()
    others = (1 - q) * ((1 - q + EPSILON) / (1 - p + EPSILON)).log()
    distance = q * (old_log_probs - x) + others
    up = (distance <= clip_ratio_high) | (p <= q)
    down = (distance <= clip_ratio_low) | (p >= q)
    kept = up.where(advantages > 0, down)
    return _kept_surrogate(log_probs, old_log_probs, advantages, weights, mask, kept, clip_ratio_c)


def _kept_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    mask: Tensor,
    kept: Tensor,
    clip_ratio_c: float,
) -> PolicyLoss:
    log_ratio = clamped(log_probs - old_log_probs)
    ratio = log_ratio.detach().exp()
    losses = (-advantages * ratio.clamp(max=clip_ratio_c) * log_probs).where(kept, 0)
    cut = (ratio > clip_ratio_c) & kept
    return result(weighted(losses, weights, mask), log_ratio, ~kept & mask, cut)
