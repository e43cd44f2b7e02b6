"""Sums, means and whitening over the positions whose mask is True.

Masked positions are taken out with `where`, never by multiplying, so NaN or infinity there changes nothing.
"""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the values that count."""
    kept = values.where(mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the values that count; 0 where none counts."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Two-pass variance of the values that count; 0 where fewer than two count."""
    count = mask.sum()
    deviation = values - masked_mean(values, mask)
    total = masked_sum(deviation.square(), mask)
    return total / (count - 1 if unbiased else count).clamp(min=1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8) over the whole batch; 0 at masked positions and where there is no spread.

    Two passes, so equal values give exactly 0 and not rounding noise scaled up.
    """
    mean = masked_mean(values, mask)
    variance = masked_var(values, mask)
    # Rounding leaves a spread of a few ulp between equal values: that is no spread.
    floor = (torch.finfo(values.dtype).eps * 8 * values.where(mask, 0).abs().max()) ** 2
    scaled = (values - mean) * torch.rsqrt(variance + 1e-8)
    return scaled.where(mask & (variance > floor), 0)
