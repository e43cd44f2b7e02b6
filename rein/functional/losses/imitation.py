"""Imitation: log-likelihood of stored responses, of all rows or of the good ones. Token losses [B, T]."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """-log pi, [B, T]: SFT, behavior cloning."""
    return -log_probs


def imitate(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]  only logged
    advantages: Tensor,  # [B, T]  not read
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
) -> PolicyLoss:
    """-w log pi of every row: behavior cloning; its filtered form is given the good rows alone."""
    log_probs, old_log_probs = counted(mask, log_probs, old_log_probs)
    losses = negative_log_likelihood(log_probs)
    return result(weighted(losses, weights, mask), log_probs - old_log_probs)
