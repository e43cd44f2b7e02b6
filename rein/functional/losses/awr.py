"""Advantage-weighted regression: imitation, weighted by how good an action was. Needs no behavior
log-probs."""

import math

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted


def awr(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]  only logged
    advantages: Tensor,  # [B, T]  whitened
    weights: Tensor | None,  # [B, T]  None: the method wants no ratio
    mask: Tensor,  # [B, T]
    *,
    beta: float = 1.0,
    weight_max: float = 20.0,
) -> PolicyLoss:
    """-min(exp(A / beta), weight_max) log pi, A detached (arXiv:1910.00177, algorithm 1).

    Raises ValueError for beta <= 0.
    """
    if beta <= 0:
        raise ValueError(f"awr: beta {beta} must be above 0: it is the temperature of the weights")
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    exponent = advantages.detach() / beta
    limit = math.log(weight_max)
    losses = -exponent.clamp(max=limit).exp() * log_probs
    return result(weighted(losses, weights, mask), log_probs - old_log_probs, exponent > limit)
