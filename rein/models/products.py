"""Matrix products of a trained weight, and where its gradient is summed.

Four ways to make y = x W^T, dx = g W and dW = g^T x:
- `Plain`: torch's own, in the weight's precision.
- `Split`: float32's, the gradients' out of bfloat16, for chips where that is quicker. With g = g1 + g2 and
  W = W1 + W2, each half bfloat16, g W = g1 W1 + g2 W1 + g1 W2, summed in float32: within 5e-6 of float64's,
  relative, where float32's own product is within 4e-7. Log-probs are as float32 gives them.
- `Half`: of bfloat16 copies; the gradient is summed in float32, beside them.
- `Wide`: of bfloat16 copies, with float32 answers: a head's.

A gradient is added to `weight.grad` where it is made, so that no second tensor of the weight's size is
written and read: these steps return no gradient for the weight, and torch.autograd.grad does not see it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

Factor = tuple[Tensor, ...]  # [N, K] as a product reads it: itself, or its two halves
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112
_ROWS_SPLIT = 32
_SPLIT_AT_ONCE = 2**16  # entries: what is in between stays in the caches


class Product(Protocol):
    """A weight [M, K] and how its products are made."""

    def times(self, x: Tensor) -> Tensor:
        """x W^T, [N, M]"""
        ...

    def factor(self, x: Tensor) -> Factor:
        """x [N, K], or a gradient [N, M], as the products below read it."""
        ...

    def back(self, grad: Factor, add_to: Tensor | None = None) -> Tensor:
        """grad W, [N, K]; added to what is given."""
        ...

    def add_gradient(self, grad: Factor, x: Factor) -> None:
        """grad^T x, [M, K], added to the weight's gradient."""
        ...

    def rows(self, cut: slice, *, summed: bool = False) -> Product:
        """Of some of the weight's rows; `summed`: their gradient is a part of the whole's."""
        ...


class Plain:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def times(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)

    def factor(self, x: Tensor) -> Factor:
        return (x,)

    def back(self, grad: Factor, add_to: Tensor | None = None) -> Tensor:
        return grad[0] @ self.weight if add_to is None else add_to.addmm_(grad[0], self.weight)

    def add_gradient(self, grad: Factor, x: Factor) -> None:
        if self.weight.grad is None:
            self.weight.grad = grad[0].t() @ x[0]
        else:
            self.weight.grad.addmm_(grad[0].t(), x[0])

    def rows(self, cut: slice, *, summed: bool = False) -> Product:
        return type(self)(_rows_of(self.weight, cut, summed=summed))


class Split(Plain):
    """Few rows are left whole: to split a product pays from some dozens on."""

    def factor(self, x: Tensor) -> Factor:
        return split(x) if len(x) >= _ROWS_SPLIT else (x,)

    def back(self, grad: Factor, add_to: Tensor | None = None) -> Tensor:
        if len(grad) == 1:
            return super().back(grad, add_to)
        return _added(_of_three(grad, split(self.weight.detach())), self.weight.shape[1], add_to)

    def add_gradient(self, grad: Factor, x: Factor) -> None:
        if len(x) == 1:
            super().add_gradient(grad, x)
        else:
            _add_gradient(self.weight, _of_three(grad, x))


class Half(Plain):
    """`copy` is what is read, `weight` is float32."""

    def __init__(self, copy: Tensor, weight: Tensor) -> None:
        super().__init__(copy)
        self.own = weight

    def add_gradient(self, grad: Factor, x: Factor) -> None:
        if self.own.device.type == "cpu" and gemm() is not None:
            _add_gradient(self.own, [(grad[0], x[0])])
        else:
            gradient_of(self.own).add_(grad[0].t() @ x[0])

    def rows(self, cut: slice, *, summed: bool = False) -> Product:
        return type(self)(self.weight[cut], _rows_of(self.own, cut, summed=summed))


class Wide(Half):
    """Only where gemm() is something."""

    def times(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        add_product(out, x.to(torch.bfloat16), self.weight, transpose_b=True, add=False)
        return out

    def factor(self, x: Tensor) -> Factor:
        return (x.to(torch.bfloat16),)

    def back(self, grad: Factor, add_to: Tensor | None = None) -> Tensor:
        return _added([(grad[0], self.weight)], self.weight.shape[1], add_to)


def gradient_of(weight: Tensor) -> Tensor:
    """Where the gradient of a weight is summed, in the weight's precision."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _rows_of(weight: Tensor, cut: slice, *, summed: bool) -> Tensor:
    rows = weight.detach()[cut]
    if summed:
        rows.grad = gradient_of(weight)[cut]
    return rows


def _add_gradient(weight: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    add = weight.grad is not None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    for grad, x in parts:
        add_product(weight.grad, grad, x, transpose_a=True, add=add)
        add = True


def _added(parts: list[tuple[Tensor, Tensor]], width: int, add_to: Tensor | None) -> Tensor:
    """The sum of a b over the parts, and what is given."""
    out, add = add_to, add_to is not None
    if out is None:
        out = parts[0][0].new_empty(len(parts[0][0]), width, dtype=torch.float32)
    for a, b in parts:
        add_product(out, a, b, add=add)
        add = True
    return out


def _of_three(a: Factor, b: Factor) -> list[tuple[Tensor, Tensor]]:
    """The factors of the three products: the fourth, of the two low halves, is below float32's rounding."""
    return [(a[0], b[0]), (a[1], b[0]), (a[0], b[1])]


def split(x: Tensor) -> Factor:
    """x1 and x2, bfloat16, with x1 + x2 = x to 17 bits."""
    x = x.contiguous()
    high, low = (torch.empty_like(x, dtype=torch.bfloat16) for _ in range(2))
    flat, of_high, of_low = x.view(-1), high.view(-1), low.view(-1)
    for begin in range(0, x.numel(), _SPLIT_AT_ONCE):
        cut = slice(begin, begin + _SPLIT_AT_ONCE)
        of_high[cut] = flat[cut]
        of_low[cut] = flat[cut] - of_high[cut]
    return high, low


def pays(weight: Tensor) -> bool:
    """Whether `Split` or `Wide` is quicker for a float32 weight: on a CPU with tiles, from 512 x 512 on."""
    large = weight.dtype == torch.float32 and weight.numel() >= 2**18
    return large and weight.device.type == "cpu" and gemm() is not None


@functools.cache
def gemm() -> Callable[..., None] | None:
    """cblas_gemm_bf16bf16f32 of the MKL inside torch, where the chip has tiles (AMX) for it; else None."""
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "amx_bf16" not in flags.read_text():
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    whole, real, place = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    found.argtypes = [*[whole] * 6, real, place, whole, place, whole, real, place, whole]
    found.restype = None
    function: Callable[..., None] = found
    return function


def add_product(
    out: Tensor,  # [m, n] float32
    a: Tensor,  # [m, k] bfloat16; [k, m] if transposed
    b: Tensor,  # [k, n] bfloat16; [n, k] if transposed
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    add: bool = True,
) -> None:
    """out += a b, or out = a b. Only where gemm() is something."""
    multiply = gemm()
    assert multiply is not None
    a, b = _rows(a), _rows(b)
    assert out.stride(1) == 1
    m, n = out.shape
    k = a.shape[0] if transpose_a else a.shape[1]
    multiply(
        _ROW_MAJOR,
        _TRANSPOSED if transpose_a else _AS_IT_IS,
        _TRANSPOSED if transpose_b else _AS_IT_IS,
        m,
        n,
        k,
        1.0,
        a.data_ptr(),
        max(a.stride(0), a.shape[1]),
        b.data_ptr(),
        max(b.stride(0), b.shape[1]),
        1.0 if add else 0.0,
        out.data_ptr(),
        max(out.stride(0), n),
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
