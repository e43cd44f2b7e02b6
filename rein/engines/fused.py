"""Llama-shaped models laid out for decoding: q, k, v in one matrix, gate and up in another, an own cache.

Which models are so shaped `readable` says; any other decodes through transformers (padded.py). The layout is
a copy of all matrices, adapters fused in, or of two thirds of them where laid_out.py lays nothing out, and
lives as long as one call of the engine.

Notation: K key heads of D numbers, G query heads for each, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rein.engines.kv_cache import Cache
from rein.engines.kv_store import Store
from rein.engines.laid_out import Product, lays_out, product_of
from rein.matmul import matmul_precision

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles depend on the position alone
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def readable(model: Any) -> bool:
    """Whether the model is one of CLASSES, all attention full, all layers plain ones or with plain LoRA."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model).__module__.startswith("transformers.models.")
        and type(model).__name__ in CLASSES
        and getattr(config, "sliding_window", None) is None
        and rope.get("rope_type", "default") in ROPE_TYPES
        and len({(parameter.dtype, parameter.device) for parameter in model.parameters()}) == 1
        and all(
            _plain(module)
            for name, module in model.model.layers.named_modules()
            if name.rsplit(".", 1)[-1] in PROJECTIONS
        )
    )


def _plain(layer: Any) -> bool:
    if type(layer) is LoraLinear:
        merged, off = layer.merged, layer.disable_adapters
        return type(layer.get_base_layer()) is nn.Linear and not (layer.lora_variant or merged or off)
    return type(layer) is nn.Linear


def _weight(layer: Any) -> Tensor:
    if type(layer) is nn.Linear:
        return layer.weight
    base: Tensor = layer.get_base_layer().weight
    for adapter in layer.active_adapters:
        delta = layer.get_delta_weight(adapter)
        base = (base.to(delta.dtype) + delta).to(base.dtype)
    return base


def _fused(*layers: Any) -> Product:
    """Of layers that read the same, one above the other."""
    biases = [layer.bias for layer in layers]
    weight = _weight(layers[0]) if len(layers) == 1 else torch.cat([_weight(layer) for layer in layers])
    return product_of(weight, None if biases[0] is None else torch.cat(biases))


def _head(layer: Any) -> Product:
    """A plain head widens what it reads to its weight's precision (models/precision.py)."""
    if type(layer) is not nn.Linear or not lays_out(layer.weight):
        return layer  # type: ignore[no-any-return]
    product, dtype = product_of(layer.weight, layer.bias), layer.weight.dtype
    return lambda hidden: product(hidden.to(dtype))


@dataclass(frozen=True, slots=True)
class _Block:
    before: Any  # the two norms
    after: Any
    qkv: Product
    head_norms: tuple[Any, Any] | None
    out: Product
    gate_up: Product
    down: Product
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layer: Any) -> _Block:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            before=layer.input_layernorm,
            after=layer.post_attention_layernorm,
            qkv=_fused(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norms=(attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None,
            out=_fused(attention.o_proj),
            gate_up=_fused(mlp.gate_proj, mlp.up_proj),
            down=_fused(mlp.down_proj),
            activation=mlp.act_fn,
        )


class Fused:
    """A readable model and the cache of at most `places` answers."""

    def __init__(self, model: Any, places: int) -> None:
        self.model = model
        self.head = _head(model.get_output_embeddings())
        self.blocks = [_Block.of(layer) for layer in model.model.layers]
        attention = model.model.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.key_heads = model.config.num_key_value_heads
        self.groups: int = attention.num_key_value_groups
        self.scaling: float = attention.scaling
        weight = model.get_input_embeddings().weight
        self.cache = Cache(len(self.blocks), places, self.key_heads, self.head_dim, weight.detach())

    def read(self, prompts: Sequence[np.ndarray], targets: Sequence[tuple[Store, int]]) -> None:
        """Put the keys and values of prompts where each has a row."""
        lengths = [len(prompt) for prompt in prompts]
        ends = np.cumsum(lengths)
        ids = torch.from_numpy(np.concatenate(list(prompts)))
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = []
            for end, length, (store, row) in zip(ends, lengths, targets, strict=True):
                q, k, v = (t[end - length : end].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
                store.put(number, row, k[0], v[0])
                with matmul_precision("highest"):
                    part = scaled_dot_product_attention(
                        q, k, v, is_causal=True, scale=self.scaling, enable_gqa=self.groups > 1
                    )
                parts.append(part[0].transpose(0, 1))
            return torch.cat(parts).flatten(1)

        self._hidden(ids, positions, attend)

    def step(self, ids: Tensor, positions: np.ndarray) -> Tensor:
        """Logits [B, V] after one more token in each place of the cache."""
        frame = self.cache.frame()

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query = (query * self.scaling).view(-1, self.groups, self.head_dim)
            return self.cache.attend(number, frame, query, key, value).view(len(ids), -1)

        hidden = self._hidden(ids, torch.from_numpy(positions), attend)
        return self.head(self.model.model.norm(hidden))

    def _hidden(
        self, ids: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[N, H], before the last norm; `attend` sees q [N, K G, D], k and v [N, K, D]."""
        device = self.cache.device
        hidden: Tensor = self.model.model.embed_tokens(ids.to(device))
        cos, sin = self.model.model.rotary_emb(hidden, positions.to(device).unsqueeze(0))
        half = self.head_dim // 2
        cos, sin = (angle[0, :, None, :half] for angle in (cos, sin))
        queries = self.key_heads * self.groups
        for number, block in enumerate(self.blocks):
            heads = block.qkv(block.before(hidden)).view(len(hidden), -1, self.head_dim)
            turning, value = heads[:, : -self.key_heads], heads[:, -self.key_heads :]
            query, key = turning[:, :queries], turning[:, queries:]
            if block.head_norms is None:
                turned = _turn(turning, cos, sin)
                query, key = turned[:, :queries], turned[:, queries:]
            else:
                query_norm, key_norm = block.head_norms
                query, key = _turn(query_norm(query), cos, sin), _turn(key_norm(key), cos, sin)
            hidden = hidden + block.out(attend(number, query, key, value))
            gate, up = block.gate_up(block.after(hidden)).chunk(2, -1)
            hidden = hidden + block.down(block.activation(gate).mul_(up))
        return hidden


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the halves of each head turned by the angle of their place (arXiv:2104.09864)."""
    one, other = heads.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
