"""Scores in, token-level rewards out: clipping, placing on tokens, KL in reward.

B rows by T right-padded positions; masks are True where a token counts.
"""

import torch
from torch import Tensor

from rein.functional.kl import kl_penalty


def last_position(mask: Tensor) -> Tensor:
    """Index of each row's last counted token, [B]; 0 where none counts."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return positions.where(mask, -1).amax(1).clamp(min=0)


def place_on_last_token(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
) -> Tensor:
    """token_level_scores [B, T]: the whole score on the last counted token, however the row ended."""
    placed = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    placed.scatter_(1, last_position(mask).unsqueeze(1), scores.unsqueeze(1))
    return placed.where(mask, 0)


def subtract_kl(
    token_level_scores: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    kl_coef: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """token_level_rewards = scores - beta * KL, and the KL itself, both [B, T] and new tensors."""
    kl = kl_penalty(old_log_probs, ref_log_probs, kind).where(mask, 0)
    return token_level_scores - kl_coef * kl, kl
