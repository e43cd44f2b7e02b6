"""M2PO: the plain surrogate on the tokens that are left when the furthest are dropped until the mean of (log
w)^2 is small. The mask needs the whole mini-batch, so it is made in a pass before the first micro-batch."""

import torch
from torch import Tensor

from rein.functional.losses.result import PolicyLoss, clamped, result, weighted
from rein.functional.masked import counted


@torch.no_grad()
def m2po_mask(
    log_probs: Tensor,  # [B, T]  of the whole mini-batch, no gradient needed
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    threshold: float = 0.04,
) -> Tensor:
    """Which tokens stay, [B, T] bool: the largest (log pi / mu)^2 go until the mean of the others <=
    threshold.

    arXiv:2510.01161, its masking. Tokens at the same distance stay or go together, so order does not matter.
    """
    log_probs, behavior_log_probs = counted(mask, log_probs, behavior_log_probs)
    square = (log_probs.double() - behavior_log_probs.double()).square()
    ascending = square[mask].sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=square.device)
    fit = int((means <= threshold).sum())
    if fit == len(ascending):
        return mask.clone()
    return mask & (square < ascending[fit])


def m2po(
    log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    kept: Tensor,  # [B, T]  what m2po_mask said of these rows
) -> PolicyLoss:
    """-r A where kept, 0 elsewhere, r = pi / mu (arXiv:2510.01161, its objective).

    Dropped tokens stay in the denominator.
    """
    log_probs, behavior_log_probs, advantages = counted(mask, log_probs, behavior_log_probs, advantages)
    log_ratio = clamped(log_probs - behavior_log_probs)
    losses = (-advantages * log_ratio.exp()).where(kept, 0)
    return result(weighted(losses, weights, mask), log_ratio, ~kept & mask)
