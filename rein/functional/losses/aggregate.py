"""How a [B, T] matrix of token losses becomes one number.

Denominators are those of the whole mini-batch over all micro-batches and ranks, handed in, so that any cut
gives the same sum. Without them the matrix at hand is the whole.
"""

import torch
from torch import Tensor

from rein.functional.masked import masked_sum

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def aggregate(
    losses: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    mode: str,
    *,
    tokens: float | None = None,  # counted tokens of the whole mini-batch
    rows: float | None = None,  # rows of the whole mini-batch with a counted token
    scale: float | None = None,  # divisor of seq-mean-token-sum-norm; default: T
) -> Tensor:
    """Scalar loss; exactly 0 with a usable graph where nothing counts.

    token-mean: sum / tokens    token-sum: sum    seq-mean-token-sum: sum / rows
    seq-mean-token-mean: sum over rows of the row's mean / rows    seq-mean-token-sum-norm: sum / rows / scale
    """
    total = masked_sum(losses, mask)
    if mode == "token-sum":
        return total
    if mode == "token-mean":
        count = mask.sum() if tokens is None else torch.as_tensor(tokens)
        return total / count.clamp(min=1)
    per_row = mask.sum(1)
    count = (per_row > 0).sum() if rows is None else torch.as_tensor(rows)
    count = count.clamp(min=1)
    if mode == "seq-mean-token-sum":
        return total / count
    if mode == "seq-mean-token-mean":
        return (masked_sum(losses, mask, 1) / per_row.clamp(min=1)).sum() / count
    if mode == "seq-mean-token-sum-norm":
        return total / count / (mask.shape[1] if scale is None else scale)
    raise ValueError(f"aggregate: mode {mode!r} is unknown; known: {', '.join(MODES)}")
