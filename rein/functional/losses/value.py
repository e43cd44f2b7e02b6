"""The critic's clipped squared error: token losses [B, T]."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor,  # [B, T]  with gradient
    old_values: Tensor | None,  # [B, T]  None: no clip
    returns: Tensor,  # [B, T]
    *,
    cliprange_value: float,
) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old +- eps) - R)^2) / 2, and where the clip decides, both [B, T].

    As in the PPO2 of OpenAI's baselines.
    """
    error = (values - returns).square()
    if old_values is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    bounded_error = (bounded - returns).square()
    return 0.5 * torch.maximum(error, bounded_error), (bounded_error > error).detach()
