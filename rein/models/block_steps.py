"""A block's norms, projections and gated layer and the embedding, each one step of the graph.

Autograd keeps every intermediate: of a norm in bfloat16, two float32 tensors and a copy of its input; of a
gated layer, four [N, I] tensors. These keep the input and one number a row, and the two projections. How a
weight's products are made and where its gradient is summed is its `Product`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding

from rein.models import elementwise
from rein.models.products import Product, gradient_of


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x r * weight with r = (mean(x^2) + eps)^(-1/2) over the last axis; in float32 or wider inside.

    Zhang & Sennrich 2019, eq. 4.
    """
    found: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return found


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: tuple[Tensor, Tensor] = elementwise.norm(x, weight, eps)
        ctx.save_for_backward(x, weight, found[1])
        return found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = elementwise.norm_gradients(grad, *ctx.saved_tensors)
        return of_x, of_weight if ctx.needs_input_grad[1] else None, None


def project(x: Tensor, product: Product, weight: Tensor) -> Tensor:
    """x W^T; x [..., K]. `weight` says by requires_grad whether a gradient is wanted."""
    found: Tensor = _Project.apply(x.reshape(-1, x.shape[-1]), weight, product)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Product) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        ctx.product = product
        return product.times(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), product = ctx.saved_tensors, ctx.product
        factor = product.factor(grad)
        if x is not None:
            product.add_gradient(factor, product.factor(x))
        return product.back(factor) if ctx.needs_input_grad[0] else None, None, None


def gated(x: Tensor, products: Sequence[Product], weights: Sequence[Tensor]) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T; x [..., H], gate and up [I, H], down [H, I]."""
    found: Tensor = _Gated.apply(x.reshape(-1, x.shape[-1]), *weights, products)  # type: ignore[no-untyped-call]
    return found.view(x.shape)


class _Gated(torch.autograd.Function):
    """g = gate x and u = up x are kept, silu(g) u is made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, products: Sequence[Product]
    ) -> Tensor:
        of_gate, of_up, of_down = ctx.products = products
        g, u = of_gate.times(x), of_up.times(x)
        ctx.save_for_backward(x, g, u)
        return of_down.times(elementwise.gate(g, u))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, g, u = ctx.saved_tensors
        of_gate, of_up, of_down = ctx.products
        wants_x, *wanted, _ = ctx.needs_input_grad
        grads, factor = of_down.factor(grad), of_gate.factor(x)
        h, dg, du = elementwise.gate_gradients(of_down.back(grads), g, u)
        if wanted[2]:
            of_down.add_gradient(grads, of_down.factor(h))
        dg, du = of_gate.factor(dg), of_up.factor(du)
        if wanted[1]:
            of_up.add_gradient(du, factor)
        if wanted[0]:
            of_gate.add_gradient(dg, factor)
        return of_up.back(du, of_gate.back(dg)) if wants_x else None, None, None, None, None


def embed(ids: Tensor, weight: Tensor, own: Tensor, padding: int | None) -> Tensor:
    """Rows of `weight`, [..., H]; their gradient is added to that of `own`."""
    found: Tensor = _Embed.apply(ids, weight, own, padding)  # type: ignore[no-untyped-call]
    return found


class _Embed(torch.autograd.Function):
    """Only the rows that were read are touched; the padding row has no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, own: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.own, ctx.padding = own, padding
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        flat, rows = ids.flatten(), grad.flatten(0, -2).to(ctx.own.dtype)
        if ctx.padding is not None:
            rows = rows.masked_fill((flat == ctx.padding).unsqueeze(1), 0)
        gradient_of(ctx.own).index_add_(0, flat, rows)
        return None, None, None, None
