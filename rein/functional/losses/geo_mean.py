"""GMPO: the objective is the geometric mean of a response's token ratios, each clipped in log space."""

import torch
from torch import Tensor

from rein.functional.losses.result import PolicyLoss, on_tokens, result
from rein.functional.masked import LOG_RATIO_CLAMP, counted, masked_mean

WEIGHT_FLOOR = 1e-10


def geo_mean(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]  one per response; where tokens differ, their mean counts
    weights: Tensor | None,  # [B, T]  their geometric mean weighs the response
    mask: Tensor,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """-A exp(mean_t l_t), l = sgn(A) min(sgn(A) d, sgn(A) clip(d, -low, high)), d = x - o.

    arXiv:2507.20673, its objective, as in verl 0.9.1. The mean is bounded at 20, above which verl overflows.
    The loss of a response stands at each of its tokens: for `seq-mean-token-mean` only.
    """
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = log_probs - old_log_probs
    bounded = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = masked_mean(pessimistic, mask, 1).clamp(max=LOG_RATIO_CLAMP).exp()
    losses = -masked_mean(advantages, mask, 1) * ratio
    if weights is not None:
        log_weights = (weights.where(mask, 0) + WEIGHT_FLOOR).log()
        losses = losses * masked_mean(log_weights, mask, 1).exp()
    outside = log_ratio != bounded
    return result(on_tokens(losses, mask), log_ratio, outside & (advantages > 0), outside & (advantages < 0))
