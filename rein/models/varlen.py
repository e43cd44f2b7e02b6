"""Attention over a pack on a GPU as one kernel, which keeps segments apart by where they begin.

q [N, H, D], k and v [N, K, D], causal within a segment. `flash_attention_2` and `varlen` are FlashAttention 2
(Dao 2023, arXiv:2307.08691), of the package flash-attn and of torch itself; they read bfloat16 alone.
`flex_attention` is compiled for a mask (Dong et al. 2024, arXiv:2412.05496). Without any of them attention.py
runs by blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from rein.errors import ConfigError
from rein.models.packing import Layout

Kernel = Callable[[Tensor, Tensor, Tensor, Layout, float | None, int | None], Tensor]  # ..., scale, window
HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # head that FlashAttention reads


def flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    begins, longest = layout.begins(q.device), max(layout.lengths)
    back = -1 if window is None else window - 1
    found: Tensor = flash_attn_varlen_func(
        q, k, v, begins, begins, longest, longest, softmax_scale=scale, causal=True, window_size=(back, 0)
    )
    return found


def varlen(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    begins, longest = layout.begins(q.device), max(layout.lengths)
    back = -1 if window is None else window - 1
    found = varlen_attn(
        q, k, v, begins, begins, longest, longest,
        scale=scale, window_size=(back, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(found, Tensor)
    return found


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    key = f"mask {window} {q.device}"
    if key not in layout.made:
        layout.made[key] = _mask(layout, q.device, window)
    query, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    attend: Any = _compiled() if q.is_cuda else flex.flex_attention
    found: Tensor = attend(
        query, keys, values, block_mask=layout.made[key], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return found[0].transpose(0, 1)


def _mask(layout: Layout, device: torch.device, window: int | None) -> flex.BlockMask:
    lengths = torch.tensor(layout.lengths, device=device)
    segment = torch.arange(len(lengths), device=device).repeat_interleave(lengths)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (segment[query] == segment[key]) & (query >= key)
        return near if window is None else near & (query - key < window)

    tokens = len(segment)
    return flex.create_block_mask(seen, None, None, tokens, tokens, device=device)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex.flex_attention, dynamic=True)


KERNELS: dict[str, Kernel] = {  # the first that is installed is `auto`
    "flash_attention_2": flash_attention_2,
    "varlen": varlen,
    "flex_attention": flex_attention,
}
_MODULES = {"flash_attention_2": "flash_attn", "varlen": "torch.nn.attention.varlen"}
_FIT = {"flash_attention_2": "install flash-attn", "varlen": "install torch 2.10 or newer"}


@functools.cache
def installed(name: str) -> bool:
    return name not in _MODULES or find_spec(_MODULES[name]) is not None


def require(name: str) -> None:
    """Raises ConfigError where what is asked for by name is not installed."""
    if not installed(name):
        raise ConfigError(f"model.attn_implementation: {name} is not here; {_FIT[name]}, or write auto")


def kernel_for(query: Tensor, wanted: str) -> Kernel | None:
    """What attends over a pack; None: blocks, on a CPU, and for what no kernel reads.

    Float32 is read by FlexAttention alone, which is taken for it only where it is asked for: blocks are as
    exact and compile nothing.
    """
    if query.device.type == "cpu" or wanted == "sdpa":
        return None
    if wanted == "flex_attention":
        return flex_attention
    if query.dtype not in HALF or query.shape[-1] % 8 or query.shape[-1] > WIDEST:
        return None
    name = next(name for name in KERNELS if installed(name)) if wanted == "auto" else wanted
    return KERNELS[name]
