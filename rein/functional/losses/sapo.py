"""SAPO: a sigmoid of the ratio in place of the clip, steeper for bad actions."""

import torch
from torch import Tensor

from rein.functional.losses.result import PolicyLoss, clamped, result, weighted
from rein.functional.masked import counted


def sapo(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    tau_pos: float,
    tau_neg: float,
) -> PolicyLoss:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos where A > 0 and tau_neg elsewhere.

    arXiv:2511.20347, its gate and objective; at r = 1 the gradient is that of r A. Made for
    `seq-mean-token-mean`.
    """
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = clamped(log_probs - old_log_probs)
    positive = torch.full_like(advantages, tau_pos)
    tau = positive.where(advantages > 0, tau_neg)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return result(weighted(-gate * advantages, weights, mask), log_ratio)
