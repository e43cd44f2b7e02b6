"""The gated layer of a block, down(silu(gate x) * up x), as one step of the graph.

Autograd keeps four [N, I] tensors of it; this keeps two, the projections, and makes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

EQUAL = 1e-5  # relative, in float32, to the module's own forward
_PARTS = ("gate_proj", "up_proj", "down_proj")
_silu_backward = torch.ops.aten.silu_backward


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


class _Forward:
    """In the place of a gated module's own forward, while its projections are plain."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        parts = [getattr(self.module, name) for name in _PARTS]
        if not all(type(part) is nn.Linear for part in parts):  # an adapter lies on one of them
            found: Tensor = self.own(x)
            return found
        return gated(x, *(part.weight for part in parts))


@torch.no_grad()
def use_gated(model: nn.Module) -> int:
    """Put it where a module is one by its parts and by what it computes; of how many."""
    count = 0
    for module in model.modules():
        parts = [getattr(module, name, None) for name in _PARTS]
        if not all(type(part) is nn.Linear and part.bias is None for part in parts):
            continue
        forward, gate = _Forward(module), parts[0]
        assert isinstance(gate, nn.Linear)
        if count == 0 and not _same(module, forward, gate):
            return 0
        module.forward = forward
        count += 1
    return count


def _same(module: nn.Module, forward: _Forward, gate: nn.Linear) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, gate.in_features, generator=generator).to(gate.weight)
    own, other = module(x), forward(x)
    return own.shape == other.shape and bool((own - other).norm() <= EQUAL * own.norm())
