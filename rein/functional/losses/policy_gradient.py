"""Policy gradients without a clip: GPG, REINFORCE with importance weights, and DRO's quadratic anchor."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted


def gpg(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]  only logged
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
) -> PolicyLoss:
    """-w A log pi: REINFORCE (Williams 1992), and without weights GPG (arXiv:2504.02546)."""
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    losses = -advantages * log_probs
    return result(weighted(losses, weights, mask), log_probs - old_log_probs)


def dro(
    log_probs: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    beta: float,
) -> PolicyLoss:
    """-(A log pi - beta / 2 (x - o)^2): the policy's part of direct reward optimisation.

    arXiv:2405.19107, its policy objective, per token as in verl 0.9.1. Raises ValueError for beta <= 0.
    """
    if beta <= 0:
        raise ValueError(f"dro: beta {beta} must be above 0: without it nothing holds the policy")
    log_probs, old_log_probs, advantages = counted(mask, log_probs, old_log_probs, advantages)
    log_ratio = log_probs - old_log_probs
    losses = 0.5 * beta * log_ratio.square() - advantages * log_probs
    return result(weighted(losses, weights, mask), log_ratio)
