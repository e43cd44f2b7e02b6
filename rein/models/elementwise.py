"""What a block does number by number between its matrix products, and the gradients of that.

Written for torch as it is: each line passes over its tensor once. `compile_steps` fuses each function to one
pass for the rest of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from rein.errors import ConfigError


class Step:
    """A function of tensors alone, as written or compiled."""

    def __init__(self, written: Callable[..., Any]) -> None:
        self.written = self.taken = written

    def __call__(self, *given: Any) -> Any:
        return self.taken(*given)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, rounded once at its end, and r."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide, copy=True)
    r = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return h.mul_(r).mul_(weight.to(wide)).to(x.dtype), r


def _norm_gradients(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """With h = x r and a = gradient * weight: dx = r (a - h mean(a h)), dweight = sum(gradient * h)."""
    h, a, wide = x.to(r.dtype, copy=True).mul_(r), grad.to(r.dtype, copy=True), weight.to(r.dtype)
    products = (a * h).flatten(0, -2)
    mean = torch.mv(products, wide).div_(x.shape[-1]).view(r.shape)
    a.mul_(wide).addcmul_(h, mean, value=-1).mul_(r)
    return a.to(x.dtype), products.sum(0).to(weight.dtype)


def _gate(g: Tensor, u: Tensor) -> Tensor:
    return silu(g).mul_(u)


def _gate_gradients(a: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h = silu(g) u again; with a its gradient, dg = a u silu'(g) and du = a silu(g)."""
    s = silu(g)
    return s * u, torch.ops.aten.silu_backward(a * u, g), s.mul_(a)


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, H, D], the halves (a, b) of each head as (a cos - b sin, b cos + a sin) of its position's angles.

    Su et al. 2021 (arXiv:2104.09864), eq. 34, the halves laid out as in Llama.
    """
    out, half = torch.empty_like(heads), heads.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = heads[..., :half], heads[..., half:]
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin)
    return out


norm, norm_gradients = Step(_norm), Step(_norm_gradients)
gate, gate_gradients = Step(_gate), Step(_gate_gradients)
STEPS = (norm, norm_gradients, gate, gate_gradients)


@functools.cache
def compile_steps() -> None:
    """Compile each step when it is first called, for any length. Raises ConfigError where torch cannot."""
    try:
        torch.compile(torch.neg)(torch.ones(2))
    except Exception as error:  # torch's own of many kinds, with what the compiler's process said
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"model.use_torch_compile: this machine cannot compile ({said}); install a C++ compiler (g++ or "
            "clang++, or set CXX) and Python's headers, or write false"
        ) from error
    for step in STEPS:
        step.taken = torch.compile(step.written, dynamic=True)
