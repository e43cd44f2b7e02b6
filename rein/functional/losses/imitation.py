"""Imitation: log-likelihood of stored responses, of all rows or of the good ones. Token losses [B, T]."""

from torch import Tensor


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
