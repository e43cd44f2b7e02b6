"""Imitation: log-likelihood of stored responses, of all rows or of the good ones. Token losses [B, T]."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """-log pi, [B, T]: SFT, behavior cloning."""
    return -log_probs


def rows_at_least(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
    *,
    threshold: float,
) -> Tensor:
    """The mask of filtered behavior cloning: only rows whose score reaches the threshold count, [B, T]."""
    return mask & (scores >= threshold).unsqueeze(1)


def imitate(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]  only logged
    advantages: Tensor,  # [B, T]  not read
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
) -> PolicyLoss:
    """-w log pi of every row: behavior cloning, and with the mask of `rows_at_least` its filtered form."""
    log_probs, old_log_probs = counted(mask, log_probs, old_log_probs)
    losses = negative_log_likelihood(log_probs)
    return result(weighted(losses, weights, mask), log_probs - old_log_probs)
