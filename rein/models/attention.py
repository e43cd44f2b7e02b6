"""Attention over a pack, registered with transformers as `rein_packed`: each row attends to itself alone.

No mask over the pack is ever built: rows of like length form blocks, and causal attention inside a
right-padded block needs none. Called without a pack (generation with a cache) it is transformers' own sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from rein.errors import ConfigError
from rein.models.packing import Group

NAME = "rein_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    attention_mask: Tensor | None,
    packing: list[Group] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T * scaling) v per row -> [1, N, H, D]."""
    if packing is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **options
        )
        return result
    if softcap is not None:
        raise ConfigError(
            "model: attention with a soft cap is not supported on packed rows yet; use another model"
        )
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [N, H, D]
    cuts = [(slice(group.start, group.stop), group) for group in packing]
    parts = [_attend(q[cut], k[cut], v[cut], group, scaling, sliding_window) for cut, group in cuts]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scaling: float | None, window: int | None
) -> Tensor:
    q, k, v = (_block(tensor, group) for tensor in (query, key, value))
    mask = None
    if window is not None and window < group.length:
        distance = torch.arange(group.length, device=query.device)
        gap = distance[:, None] - distance[None, :]
        mask = (gap >= 0) & (gap < window)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    flat = out.transpose(1, 2).reshape(group.rows * group.length, *query.shape[1:])
    return flat if group.scatter is None else flat.index_select(0, group.scatter)


def _block(tensor: Tensor, group: Group) -> Tensor:
    """[N, H, D] -> [rows, H, length, D], right-padded with 0."""
    if group.scatter is not None:
        padded = tensor.new_zeros((group.rows * group.length, *tensor.shape[1:]))
        tensor = padded.index_copy(0, group.scatter, tensor)
    return tensor.view(group.rows, group.length, *tensor.shape[1:]).transpose(1, 2)


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask for a pack, which is called without one; sdpa's for padded generation."""
    if attention_mask is None:
        return None
    result: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **options)
    return result


def register() -> None:
    """Make `rein_packed` known to transformers, and keep its bars and hints off the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
