"""What every policy loss returns, and the three steps they share.

Each takes `(log_probs, old_log_probs, advantages, weights, mask, *, its options)` and gives token losses [B,
T], which losses/aggregate.py turns into one number. The second argument is what the ratio's denominator
holds: losses/table.py says whose log-probs it wants. Weights are bounded and detached, None for none. Where
the mask is False, losses and gradients are 0, whatever lies there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.masked import LOG_RATIO_CLAMP


class PolicyLoss(NamedTuple):
    """Token losses and, per token, what is logged of them; all [B, T]."""

    losses: Tensor
    clipped: Tensor  # the clip bounds the loss here
    clipped_lower: Tensor  # a second bound, from the other side, holds here
    log_ratio: Tensor


def clamped(log_ratio: Tensor) -> Tensor:
    """Within +-20, so that its exponential stays finite; no gradient outside."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def weighted(losses: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor:
    """Losses times importance weights; 0 where masked."""
    if weights is not None:
        losses = losses * weights
    return losses if mask is None else losses.where(mask, 0)


def result(
    losses: Tensor,
    log_ratio: Tensor,
    clipped: Tensor | None = None,
    clipped_lower: Tensor | None = None,
) -> PolicyLoss:
    """The losses with what is logged, detached; a bound that does not exist never holds."""
    never = torch.zeros_like(losses, dtype=torch.bool)
    return PolicyLoss(
        losses,
        never if clipped is None else clipped.detach(),
        never if clipped_lower is None else clipped_lower.detach(),
        log_ratio.detach(),
    )


def on_tokens(rows: Tensor, mask: Tensor) -> Tensor:
    """A number per row [B] at each counted token [B, T]: `seq-mean-token-mean` makes the mean over rows of
    it."""
    return rows.unsqueeze(1).expand(mask.shape).where(mask, 0)
