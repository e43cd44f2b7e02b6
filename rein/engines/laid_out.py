"""Products with a weight that stays: on a CPU laid out once as oneDNN reads it, not anew in every call.

A laid out weight is a copy of the weight's size. torch's own operators for it are private, so they are taken
only where they are there and a product of theirs is that of `linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor], Tensor]
_ROWS = 128  # of what is multiplied, for which a layout is chosen; others are right too
_CLOSE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # relative to the largest number of a product


def product_of(weight: Tensor, bias: Tensor | None = None) -> Product:
    """x -> x W^T + b; the weight must not move while it is used."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if lays_out(weight):
        return _laid_out(weight, bias)
    return functools.partial(linear, weight=weight, bias=bias)


def lays_out(weight: Tensor) -> bool:
    """Where torch leaves these products to oneDNN: bfloat16, and float32 of a precision below "highest".

    Else float32's are MKL's, which has layouts of its own.
    """
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if weight.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return False
    return _is_right(weight.dtype)


def _laid_out(weight: Tensor, bias: Tensor | None) -> Product:
    multiply = torch.ops.mkldnn._linear_pointwise
    laid: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    def product(x: Tensor) -> Tensor:
        found: Tensor = multiply(x, laid, bias, "none", [], "")
        return found

    return product


@functools.cache
def _is_right(dtype: torch.dtype) -> bool:
    """Whether the operators are there and a product with a laid out weight is that of `linear`."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 64), (96, 64), (96,))
    )
    expected = linear(x, weight, bias)
    try:
        found = _laid_out(weight, bias)(x)
    except (AttributeError, RuntimeError):
        return False
    return bool((found - expected).abs().max() <= _CLOSE[dtype] * expected.abs().max())
