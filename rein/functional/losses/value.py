"""The critic's clipped squared error: token losses [B, T]."""

import torch
from torch import Tensor

from rein.functional.masked import counted


def value_loss(
    values: Tensor,  # [B, T]  with gradient
    old_values: Tensor | None,  # [B, T]  None: no clip
    returns: Tensor,  # [B, T]
    mask: Tensor | None = None,  # [B, T]  0 where it is False
    *,
    cliprange_value: float,
) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old +- eps) - R)^2) / 2, and where the clip decides, both [B, T].

    As in the PPO2 of OpenAI's baselines.
    """
    values, returns = counted(mask, values, returns)
    error = (values - returns).square()
    if old_values is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    (old_values,) = counted(mask, old_values)
    bounded = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    bounded_error = (bounded - returns).square()
    return 0.5 * torch.maximum(error, bounded_error), (bounded_error > error).detach()
