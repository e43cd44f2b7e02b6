"""Attention over a pack, registered with transformers as `rein_packed`: each row attends to itself alone.

No mask over the pack is ever built: segments of like length form blocks, and causal attention inside a
right-padded block needs none. Answers to a prompt that lies in the pack once attend to it in a second call,
without a mask, and the two are merged by log-sum-exp. On a GPU one kernel takes the whole pack (varlen.py),
or blocks where none reads it. Called without a pack (generation with a cache) it is transformers' own sdpa.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from rein.errors import ConfigError
from rein.matmul import matmul_precision
from rein.models import elementwise
from rein.models.packing import Group, Layout
from rein.models.varlen import kernel_for

NAME = "rein_packed"
# By model.attn_implementation. transformers would take `flash` or `flex` in a name for its own.
NAMES = {
    "auto": NAME,
    "flash_attention_2": f"{NAME}_fa2",
    "varlen": f"{NAME}_varlen",
    "flex_attention": f"{NAME}_fx",
    "sdpa": f"{NAME}_blocks",
}
_aten = torch.ops.aten


def _flash(*tensors: Tensor, causal: bool, scale: float | None) -> Any:
    """o and the log of the softmax's sum, of query, key and value; its tiles are small."""
    with matmul_precision("highest"):
        return _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)


def _flash_backward(*tensors: Tensor, causal: bool, scale: float | None) -> Any:
    """Gradients of query, key and value, given the gradient, these three, o and the log-sum."""
    with matmul_precision("highest"):
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)


def can_share(config: Any, device: torch.device) -> bool:
    """Whether a model's packs may hold a prompt once for several answers: whole attention, on a CPU."""
    return device.type == "cpu" and not getattr(config, "sliding_window", None)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, N, D]
    value: Tensor,  # [1, K, N, D]
    attention_mask: Tensor | None,
    packing: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
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
    slices, tokens = packing.slices, packing.tokens
    if slices is not None:
        times = slices.repeats(k.shape[1])
        k, v = (t.repeat_interleave(times, 1) if times > 1 else t for t in (k, v))
        q, k, v = (slices.heads(t, tokens) for t in (q, k, v))
    out = _of_pack(q, k, v, packing, scaling, sliding_window, implementation)
    return (out if slices is None else slices.positions(out)).unsqueeze(0), None


def _of_pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Layout,
    scaling: float | None,
    sliding_window: int | None,
    implementation: str,
) -> Tensor:
    if q.device.type == "cpu" and sliding_window is None:
        return segments(q, k, v, packing, scaling)
    if packing.prompts:
        raise ConfigError("model: attention in a window over a shared prompt; pack these rows unshared")
    kernel = kernel_for(q, implementation)
    if kernel is not None:
        return kernel(q, k, v, packing, scaling, sliding_window)
    cuts = [(slice(group.start, group.stop), group) for group in packing.groups]
    parts = [_attend(q[cut], k[cut], v[cut], group, scaling, sliding_window) for cut, group in cuts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def segments(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, K, D]
    value: Tensor,  # [N, K, D]
    layout: Layout,
    scaling: float | None,
    cos: Tensor | None = None,  # [N, D / 2] of each position's angles, which queries and keys are turned by
    sin: Tensor | None = None,
) -> Tensor:
    """Attention of a pack on a CPU, [N, H, D]."""
    found: Tensor = _Segments.apply(query, key, value, layout, scaling, cos, sin)  # type: ignore[no-untyped-call]
    return found


class _Segments(torch.autograd.Function):
    """Attention of a whole pack as one step of the graph, the turning of queries and keys included.

    With o_1, l_1 over a segment's own keys and o_2, l_2 over its prompt's (l: log of the softmax's sum),
    l = log(e^l_1 + e^l_2) and o = e^(l_1 - l) o_1 + e^(l_2 - l) o_2. Given o and l, flash attention's
    gradient (Dao et al. 2022, appendix B.2) is a sum over keys, so each call adds its own part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        scaling: float | None,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        if cos is not None and sin is not None:
            query, key = elementwise.turned(query, cos, sin), elementwise.turned(key, cos, sin)
        out = query.new_empty(query.shape)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        sums = query.new_empty(query.shape[:2], dtype=wide)  # [N, H]
        for group in layout.groups:
            cut = slice(group.start, group.stop)
            blocks = (_block(t[cut], group) for t in (query, key, value))
            found, log_sum = _flash(*blocks, causal=True, scale=scaling)
            out[cut], sums[cut] = _flat(found, group), _flat(log_sum, group)
        for prompt in layout.prompts:
            own, keys = slice(prompt.own_start, prompt.own_stop), slice(prompt.start, prompt.stop)
            rows = (_row(t) for t in (query[own], key[keys], value[keys]))
            found, log_sum = _flash(*rows, causal=False, scale=scaling)
            other = log_sum[0].transpose(0, 1)
            share = torch.sigmoid(other - sums[own]).unsqueeze(-1)  # of the prompt
            sums[own] = torch.logaddexp(sums[own], other)
            out[own] = torch.lerp(out[own].to(wide), found[0].transpose(0, 1).to(wide), share).to(out.dtype)
        ctx.save_for_backward(query, key, value, out, cos, sin, sums)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, cos, sin, sums = ctx.saved_tensors
        # torch's kernel takes milliseconds to start in half precision; short segments are all start.
        grad, query, key, value, out = (t.to(sums.dtype) for t in (grad, *saved))
        grads = [t.new_empty(t.shape) for t in (query, key, value)]
        for group in ctx.layout.groups:
            cut = slice(group.start, group.stop)
            some = (_block(t[cut], group) for t in (grad, query, key, value, out, sums))
            found = _flash_backward(*some, causal=True, scale=ctx.scaling)
            for whole, part in zip(grads, found, strict=True):
                whole[cut] = _flat(part, group)
        for prompt in ctx.layout.prompts:
            own, keys = slice(prompt.own_start, prompt.own_stop), slice(prompt.start, prompt.stop)
            parts = (grad[own], query[own], key[keys], value[keys], out[own], sums[own])
            found = _flash_backward(*(_row(t) for t in parts), causal=False, scale=ctx.scaling)
            for whole, cut, part in zip(grads, (own, keys, keys), found, strict=True):
                whole[cut] += part[0].transpose(0, 1)
        if cos is not None:
            back = cos.to(sums.dtype), -sin.to(sums.dtype)
            grads[:2] = [elementwise.turned(t, *back) for t in grads[:2]]
        of_query, of_key, of_value = (t.to(saved[0].dtype) for t in grads)
        return of_query, of_key, of_value, None, None, None, None


def _row(tensor: Tensor) -> Tensor:
    """[n, H, ...] -> [1, H, n, ...]"""
    return tensor.transpose(0, 1).unsqueeze(0)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, group: Group, scaling: float | None, window: int | None
) -> Tensor:
    if query.device.type != "cpu":  # no kernel of float32 shares a key head among queries
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    q, k, v = (_block(tensor, group) for tensor in (query, key, value))
    mask = None
    if window is not None and window < group.length:
        distance = torch.arange(group.length, device=query.device)
        gap = distance[:, None] - distance[None, :]
        mask = (gap >= 0) & (gap < window)
    grouped = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return _flat(out, group)


def _block(tensor: Tensor, group: Group) -> Tensor:
    """[N, H, ...] -> [rows, H, length, ...], right-padded with 0."""
    if group.scatter is not None:
        padded = tensor.new_zeros((group.rows * group.length, *tensor.shape[1:]))
        tensor = padded.index_copy(0, group.scatter, tensor)
    return tensor.view(group.rows, group.length, *tensor.shape[1:]).transpose(1, 2)


def _flat(block: Tensor, group: Group) -> Tensor:
    """[rows, H, length, ...] -> [N, H, ...], without the padding."""
    flat = block.transpose(1, 2).reshape(group.rows * group.length, block.shape[1], *block.shape[3:])
    return flat if group.scatter is None else flat.index_select(0, group.scatter)


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """No mask for a pack, which is called without one; sdpa's for padded generation."""
    if attention_mask is None:
        return None
    result: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **options)
    return result


def register() -> None:
    """Make `rein_packed` and its kin known to transformers; keep its bars and hints off the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for implementation, name in NAMES.items():
        AttentionInterface.register(name, partial(packed_attention, implementation=implementation))
        AttentionMaskInterface.register(name, _mask)
