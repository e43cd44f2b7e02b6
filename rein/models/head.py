"""log softmax(h W^T)[id] without holding the logits: one step of the graph.

R positions by V vocabulary entries. Float32 logits are held for one chunk at a time. Where all fit one chunk,
or four in bfloat16, their probabilities are kept for the gradient; else each chunk's are made again. Sums and
softmax are in float32 or wider whatever the trunk's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rein.models.forwards import product_of
from rein.models.precision import matmul_precision
from rein.models.products import Product, Wide

_HALVES_KEPT = 4  # chunks


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
    chunk: int,  # positions whose logits are held at once
    precision: str,  # of its own float32 matrix products
) -> Tensor:
    """[R], with a gradient for hidden; the weight's is added where it is summed."""
    product, weight = product_of(head), head.weight
    found: Tensor = _LogProbs.apply(hidden, weight, ids, product, chunk, precision)  # type: ignore[no-untyped-call]
    return found


class _LogProbs(torch.autograd.Function):
    """d log p_id / d z = 1[id] - p, z the logits: with g the answer's gradient and G = g (1[id] - p),
    dh = G W and dW = G^T h.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        product: Product,
        chunk: int,
        precision: str,
    ) -> Tensor:
        found = hidden.new_empty(len(hidden))
        keeps = (
            any(ctx.needs_input_grad) and len(hidden) <= (_HALVES_KEPT if _is_half(product) else 1) * chunk
        )
        kept = []
        with matmul_precision(precision):
            for cut in _cuts(len(hidden), chunk):
                logits = torch.log_softmax(product.times(hidden[cut]), -1)
                found[cut] = logits.gather(1, ids[cut].unsqueeze(1)).squeeze(1)
                if keeps:
                    kept.append(logits.exp_().to(torch.bfloat16) if _is_half(product) else logits.exp_())
        ctx.save_for_backward(hidden, ids, found, *kept)
        ctx.product, ctx.chunk, ctx.precision = product, chunk, precision
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, ids, log_probs, *kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        of_hidden, product = torch.empty_like(hidden) if wants_hidden else None, ctx.product
        to_id = grad * -torch.expm1(log_probs)  # 1 - p, whole also where p is near 1
        with matmul_precision(ctx.precision):
            for i, cut in enumerate(_cuts(len(hidden), ctx.chunk)):
                slope = kept[i] if kept else torch.softmax(product.times(hidden[cut]), -1)
                slope = slope.mul_(-grad[cut].unsqueeze(1).to(slope.dtype))
                slope.scatter_(1, ids[cut].unsqueeze(1), to_id[cut].unsqueeze(1).to(slope.dtype))
                slopes = product.factor(slope)
                if of_hidden is not None:
                    of_hidden[cut] = product.back(slopes)
                if wants_weight:
                    product.add_gradient(slopes, product.factor(hidden[cut]))
        return of_hidden, None, None, None, None, None


def _is_half(product: Product) -> bool:
    """Whether its factors are bfloat16: probabilities then lose nothing by it."""
    return isinstance(product, Wide)


def _cuts(positions: int, chunk: int) -> list[slice]:
    return [slice(begin, begin + chunk) for begin in range(0, positions, chunk)]
