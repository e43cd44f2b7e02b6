"""log softmax(h W^T)[id] without holding more than one chunk of logits: one step of the graph.

R positions by V vocabulary entries. Where all logits fit one chunk they are kept for the gradient, else each
chunk's are made again. In float32 or wider whatever the trunk's precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rein.models.precision import matmul_precision


def plain_head(model: Any) -> nn.Linear | None:
    """The output layer, where logits are its weight times the hidden states and nothing else."""
    head, config = model.get_output_embeddings(), model.config
    more = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    if type(head) is not nn.Linear or head.bias is not None or any(getattr(config, n, None) for n in more):
        return None
    return head


def head_log_probs(
    hidden: Tensor,  # [R, H] of the head's dtype, over the temperature
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [R]
    *,
    chunk: int,  # positions whose logits are held at once
    precision: str,  # of its float32 matrix products
) -> Tensor:
    """[R], with gradients for hidden and weight."""
    found: Tensor = _LogProbs.apply(hidden, weight, ids, chunk, precision)  # type: ignore[no-untyped-call]
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
        chunk: int,
        precision: str,
    ) -> Tensor:
        found = hidden.new_empty(len(hidden))
        logits = hidden.new_empty(0)
        with matmul_precision(precision):
            for cut in _cuts(len(hidden), chunk):
                logits = torch.log_softmax(linear(hidden[cut], weight), -1)
                found[cut] = logits.gather(1, ids[cut].unsqueeze(1)).squeeze(1)
        kept = logits if len(hidden) <= chunk and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, ids, kept)
        ctx.chunk, ctx.precision = chunk, precision
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, kept = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight) if wants_weight else None
        with matmul_precision(ctx.precision):
            for cut in _cuts(len(hidden), ctx.chunk):
                slope = torch.softmax(linear(hidden[cut], weight), -1) if kept is None else kept.exp()
                g = grad[cut].unsqueeze(1)
                slope.mul_(-g).scatter_add_(1, ids[cut].unsqueeze(1), g)
                if of_hidden is not None:
                    torch.mm(slope, weight, out=of_hidden[cut])
                if of_weight is not None:
                    of_weight.addmm_(slope.t(), hidden[cut])
        return of_hidden, of_weight, None, None, None


def _cuts(positions: int, chunk: int) -> list[slice]:
    return [slice(begin, begin + chunk) for begin in range(0, positions, chunk)]
