"""log softmax(h W^T)[id] without holding the logits: one step of the graph.

R positions by V vocabulary entries. Float32 logits are held for one tile at a time, all positions by a part
of the vocabulary, few enough for a CPU's caches; each tile leaves its largest logit and its sum of
exponentials. What fits is kept for the gradient (in bfloat16 where products are bfloat16's), the rest is made
again. Sums and softmax are in float32 or wider whatever the trunk's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rein.matmul import matmul_precision
from rein.models.forwards import product_of
from rein.models.products import Product, Wide

TILE = 2**22  # entries that a CPU's caches hold
_LEAST_WIDTH = 512  # of a tile: narrower products are slow
_KEPT = 4  # entries kept for the gradient, in multiples of those held at once


def plain_head(model: Any) -> nn.Linear | None:
    """The output layer, where logits are its weight times the hidden states and nothing else."""
    head, config = model.get_output_embeddings(), model.config
    more = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    if type(head) is not nn.Linear or head.bias is not None or any(getattr(config, n, None) for n in more):
        return None
    return head


def head_log_probs(
    hidden: Tensor,  # [R, H] of the head's dtype, over the temperature
    head: nn.Linear,  # plain_head's
    ids: Tensor,  # [R]
    *,
    entries: int,  # of [R, V] that are held at once
    precision: str,  # of its own float32 matrix products
) -> Tensor:
    """[R], with a gradient for hidden; the weight's is added where it is summed."""
    product, weight, positions = product_of(head), head.weight, len(hidden)
    width = tile = entries
    if hidden.device.type == "cpu" and hidden.dtype == _wide(hidden):  # sums over tiles lose nothing
        tile = min(entries, TILE)
        width = max(tile // max(positions, 1), _LEAST_WIDTH)
    width = min(width, len(weight))
    parts = []
    for cut in _cuts(positions, max(tile // width, 1)):
        share = (cut.stop - cut.start) / positions
        keeps = int(_KEPT * entries * share) if torch.is_grad_enabled() else 0
        parts.append(_LogProbs.apply(hidden[cut], weight, ids[cut], product, width, keeps, precision))  # type: ignore[no-untyped-call]
    return torch.cat(parts) if parts else hidden.new_empty(0)


class _LogProbs(torch.autograd.Function):
    """d log p_id / d z = 1[id] - p, z the logits: with g the answer's gradient and G = g (1[id] - p),
    dh = G W and dW = G^T h, both sums over tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        product: Product,
        width: int,  # of a tile
        keeps: int,  # entries
        precision: str,
    ) -> Tensor:
        cuts, half = _cuts(len(weight), width), _is_half(product, hidden)
        found = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        tops, sums = (found.new_empty(len(cuts), len(hidden)) for _ in range(2))
        left, kept = keeps if any(ctx.needs_input_grad) else 0, []
        with matmul_precision(precision):
            for i, cut in enumerate(cuts):
                logits = product.rows(cut).times(hidden).to(found.dtype)
                at, column = _places(ids, cut)
                found[at] = logits[at, column]
                tops[i] = logits.amax(1)
                logits.sub_(tops[i].unsqueeze(1)).exp_()
                sums[i] = logits.sum(1)
                left -= logits.numel()
                if left >= 0:
                    kept.append(logits.to(torch.bfloat16) if half else logits)
        top = tops.amax(0)
        rest = (sums * (tops - top).exp()).sum(0).log()
        found, log_sum = (found - top) - rest, top + rest  # in turn, or what is missing to 1 is rounded away
        ctx.save_for_backward(hidden, ids, found, tops - log_sum, log_sum, *kept)
        ctx.product, ctx.cuts, ctx.precision = product, cuts, precision
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, ids, log_probs, tops, log_sum, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        factor, of_hidden = ctx.product.factor(hidden), None
        to_id = grad * -torch.expm1(log_probs)  # 1 - p, whole also where p is near 1
        with matmul_precision(ctx.precision):
            for i, cut in enumerate(ctx.cuts):
                part = ctx.product.rows(cut, summed=wants_weight)
                if i < len(kept):
                    slope, scale = kept[i], -grad * tops[i].exp()
                else:
                    logits = part.times(hidden).to(log_sum.dtype)
                    slope, scale = logits.sub_(log_sum.unsqueeze(1)).exp_(), -grad
                slope = slope.mul_(scale.unsqueeze(1).to(slope.dtype))
                at, column = _places(ids, cut)
                slope[at, column] = to_id[at].to(slope.dtype)
                slopes = part.factor(slope if isinstance(part, Wide) else slope.to(hidden.dtype))
                if wants_hidden:
                    of_hidden = part.back(slopes, of_hidden)
                if wants_weight:
                    part.add_gradient(slopes, factor)
        return of_hidden, None, None, None, None, None, None


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _is_half(product: Product, hidden: Tensor) -> bool:
    """Whether its factors are bfloat16: probabilities then lose nothing by it."""
    return isinstance(product, Wide) or hidden.dtype == torch.bfloat16


def _places(ids: Tensor, cut: slice) -> tuple[Tensor, Tensor]:
    """The positions whose id is in this part of the vocabulary, and its column there."""
    at = ((ids >= cut.start) & (ids < cut.stop)).nonzero().squeeze(1)
    return at, ids[at] - cut.start


def _cuts(count: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
