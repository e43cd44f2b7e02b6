"""Attention over a pack as it is defined: one segment at a time, every score written down."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rein.models.packing import Layout, pack
from rein.types import TokenRow


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None = None) -> Tensor:
    """Causal within each segment, at the usual scale; q [N, H, D], k and v [N, K, D]."""
    parts, begin, groups = [], 0, q.shape[1] // k.shape[1]
    for length in lengths:
        some = slice(begin, begin + length)
        query, key, value = (
            t[some].transpose(0, 1)
            for t in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        )
        gap = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        seen = (gap >= 0) & (gap < (length if window is None else window))
        scores = query @ key.transpose(1, 2) / math.sqrt(q.shape[-1])
        parts.append((scores.masked_fill(~seen, -math.inf).softmax(-1) @ value).transpose(0, 1))
        begin += length
    return torch.cat(parts)


def drawn_pack(
    rows: Sequence[TokenRow],
    dtype: torch.dtype,
    device: str,
    *,
    heads: int = 6,
    key_heads: int = 2,
    width: int = 16,
) -> tuple[list[Tensor], Tensor, Layout]:
    """Queries, keys and values of a pack, which want gradients; a gradient of the answer; the layout."""
    layout = pack(rows, device).layout
    generator, tokens = torch.Generator().manual_seed(0), sum(layout.lengths)
    shapes = [(tokens, count, width) for count in (heads, key_heads, key_heads, heads)]
    *given, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return [tensor.requires_grad_() for tensor in given], grad, layout
