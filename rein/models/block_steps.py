"""RMSNorm and a block's gated layer, each fused to one step of the graph that keeps little for its gradient.

Autograd keeps every intermediate: of a norm in bfloat16, two float32 tensors and a copy of its input; of a
gated layer, four [N, I] tensors. These keep the input and one number a row, and the two projections. They
take the place of a module's own forward where they compute what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

EQUAL = 1e-5  # relative, in float32, to the module's own forward
_PARTS = ("gate_proj", "up_proj", "down_proj")
_silu_backward = torch.ops.aten.silu_backward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x r * weight with r = (mean(x^2) + eps)^(-1/2) over the last axis; in float32 or wider inside.

    Zhang & Sennrich 2019, eq. 4.
    """
    found: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return found


class _RmsNorm(torch.autograd.Function):
    """With h = x r and a = gradient * weight: dx = r (a - h mean(a h)), dweight = sum(gradient * h)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        r = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        out: Tensor = (x * r).to(x.dtype).mul_(weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        h, of_weight = x * r, None
        a = grad.to(h.dtype, copy=True)
        if ctx.needs_input_grad[1]:
            of_weight = (a * h).flatten(0, -2).sum(0).to(weight.dtype)
        a.mul_(weight)
        a.addcmul_(h, (a * h).mean(-1, keepdim=True), value=-1).mul_(r)
        return a.to(x.dtype), of_weight, None


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T; x [..., H], gate and up [I, H], down [H, I]."""
    found: Tensor = _Gated.apply(x.reshape(-1, x.shape[-1]), gate, up, down)  # type: ignore[no-untyped-call]
    return found.view(x.shape)


class _Gated(torch.autograd.Function):
    """With g = gate x, u = up x, s = silu(g) and a the gradient of s u: dg = a u silu'(g), du = a s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        g, u = linear(x, gate), linear(x, up)
        ctx.save_for_backward(x, gate, up, down, g, u)
        return linear(silu(g).mul_(u), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, down, g, u = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down = ctx.needs_input_grad
        s = silu(g)
        of_down = grad.t() @ (s * u) if wants_down else None
        a = grad @ down
        du = s.mul_(a)
        dg = _silu_backward(a.mul_(u), g)
        of_x = torch.addmm(dg @ gate, du, up) if wants_x else None
        return of_x, dg.t() @ x if wants_gate else None, du.t() @ x if wants_up else None, of_down


class _NormForward:
    """In the place of an RMSNorm's forward."""

    def __init__(self, module: Any, eps: float) -> None:
        self.module, self.eps = module, eps

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.module.weight, self.eps)


class _GatedForward:
    """In the place of a gated module's forward, while its projections are plain."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        parts = [getattr(self.module, name) for name in _PARTS]
        if not all(type(part) is nn.Linear for part in parts):  # an adapter lies on one of them
            found: Tensor = self.own(x)
            return found
        return gated(x, *(part.weight for part in parts))


@torch.no_grad()
def use_fused(model: nn.Module) -> int:
    """Put them where a module has the parts and the first of its kind computes the same; of how many."""
    same: dict[tuple[type, int], bool] = {}
    count = 0
    for module in model.modules():
        forward, width = _replacement(module)
        if forward is None:
            continue
        kind = type(module), width
        if kind not in same:
            same[kind] = _same(module, forward, width)
        if same[kind]:
            module.forward = forward
            count += 1
    return count


def _replacement(module: nn.Module) -> tuple[Callable[[Tensor], Tensor] | None, int]:
    """What may take its forward's place, and the width of its input."""
    parts = [getattr(module, name, None) for name in _PARTS]
    if all(type(part) is nn.Linear and part.bias is None for part in parts):
        return _GatedForward(module), int(parts[0].in_features)  # type: ignore[union-attr]
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(eps, float):
        return _NormForward(module, eps), weight.shape[-1]
    return None, 0


def _same(module: nn.Module, forward: Callable[[Tensor], Tensor], width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator).to(next(module.parameters()))
    try:
        own, other = module(x), forward(x)
    except (TypeError, ValueError, RuntimeError):  # it takes more than one input
        return False
    return own.shape == other.shape and bool((own - other).norm() <= EQUAL * own.norm())
