"""GSPO: the clipped surrogate with one ratio per response, its tokens' geometric mean."""

import torch
from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted, masked_mean

LOG_RATIO_MAX = 10.0


def gspo(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with s_t = sg(exp(mean_t(x - o))) x_t / sg(x_t).

    arXiv:2507.18071, eq. 5, 7 and, for the token form, 13 and 14. log s is at most 10 and has no gradient
    beyond. Made for `seq-mean-token-mean`.
    """
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = log_probs - old_log_probs
    row = masked_mean(log_ratio.detach(), mask, 1).unsqueeze(1)
    ratio = (log_probs - log_probs.detach() + row).clamp(max=LOG_RATIO_MAX).exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(unclipped, bounded)
    return result(weighted(losses, weights, mask), log_ratio, (bounded > unclipped) & mask)
