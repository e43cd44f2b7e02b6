"""Sums, means and whitening over the positions whose mask is True.

Masked positions are taken out with `where`, never by multiplying, so NaN or infinity there changes nothing:
no result, and no gradient.
"""

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0  # its exponential, 5e8, is finite in float32


def counted(mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 where the mask is False, before anything is computed of them; no mask, no change.

    A loss that is masked only afterwards has the right value and NaN gradients: 0 times the slope at a NaN.
    """
    return tensors if mask is None else tuple(tensor.where(mask, 0) for tensor in tensors)


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
    (values,) = counted(mask, values)
    count = mask.sum()
    deviation = values - masked_mean(values, mask)
    total = masked_sum(deviation.square(), mask)
    return total / (count - 1 if unbiased else count).clamp(min=1)


def whiten(values: Tensor, mask: Tensor, *, center: bool = True) -> Tensor:
    """(v - mean) / sqrt(var + 1e-8) over the whole batch; 0 at masked positions and where there is no spread.

    `center=False` only scales: v / sqrt(var + 1e-8), whose mean is the old one scaled, not added back. Two
    passes, so equal values give exactly 0 and not rounding noise scaled up.
    """
    (values,) = counted(mask, values)
    mean = masked_mean(values, mask)
    variance = masked_var(values, mask)
    # Rounding leaves a spread of a few ulp between equal values: that is no spread.
    floor = (torch.finfo(values.dtype).eps * 8 * values.abs().max()) ** 2
    scaled = (values - mean if center else values) * torch.rsqrt(variance + 1e-8)
    return scaled.where(mask & (variance > floor), 0)
