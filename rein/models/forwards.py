"""What takes the place of a module's own forward, where it computes the same.

It is tried on a few numbers first. A module that reads adapters, has a cache or no pack goes its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rein.models.attention import segments
from rein.models.block_steps import embed, gated, project, rms_norm
from rein.models.packing import Group, Layout
from rein.models.products import Plain, Product

Kind = Callable[[nn.Linear], Product]  # how the products of a layer's weight are made
EQUAL = 1e-5  # relative, in float32, to the module's own forward
_ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PARTS = ("gate_proj", "up_proj", "down_proj")


class _NormForward:
    """In the place of an RMSNorm's forward."""

    def __init__(self, module: Any, eps: float) -> None:
        self.module, self.eps = module, eps

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.module.weight, self.eps)


class _GatedForward:
    """In the place of a gated module's forward, while its projections are plain."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, x: Tensor) -> Tensor:
        parts = [getattr(self.module, name) for name in _PARTS]
        if not all(type(part) is nn.Linear for part in parts):  # an adapter lies on one of them
            found: Tensor = self.own(x)
            return found
        return gated(x, [product_of(part) for part in parts], [part.weight for part in parts])


class _AttentionForward:
    """In the place of an attention module's forward, for a pack on a CPU."""

    def __init__(self, module: Any) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, hidden_states: Tensor, *more: Any, **options: Any) -> Any:
        packing: Layout | None = options.get("packing")
        apart = (
            packing is not None and packing.slices is not None
        )  # the pack's positions lie on several ranks
        if packing is None or apart or more or hidden_states.device.type != "cpu":
            return self.own(hidden_states, *more, **options)
        module, count = self.module, hidden_states.shape[1]
        if options["position_embeddings"][0].shape[-1] != module.head_dim:  # only a part of a head turns
            return self.own(hidden_states, **options)
        q, k, v = (
            layer(hidden_states).view(count, -1, module.head_dim)
            for layer in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        cos, sin = (angles[0, :, : module.head_dim // 2] for angles in options["position_embeddings"])
        out = segments(q, k, v, packing, module.scaling, cos, sin)
        return module.o_proj(out.view(1, count, -1)), None


class _LinearForward:
    """In the place of a linear layer's forward."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        found = project(input, product_of(module), module.weight)
        return found if module.bias is None else found + module.bias


class _EmbeddingForward:
    """In the place of an embedding's forward."""

    def __init__(self, module: nn.Embedding) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        own = self.module._parameters["weight"]
        assert own is not None
        return embed(input, self.module.weight, own, self.module.padding_idx)


def product_of(layer: nn.Linear) -> Product:
    """How a linear layer's products are made, of the weight it has now: as it was told, else plainly."""
    known: Kind | None = layer.__dict__.get("product")
    return Plain(layer.weight) if known is None else known(layer)


def sum_in_place(module: nn.Module, product: Kind | None = None) -> None:
    """Let a linear layer or an embedding add its gradient where it is summed."""
    if type(module) is nn.Linear:
        module.__dict__["product"] = product
        module.forward = _LinearForward(module)  # type: ignore[method-assign]
    elif type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
        module.forward = _EmbeddingForward(module)  # type: ignore[method-assign]


@torch.no_grad()
def use_own_forwards(model: nn.Module) -> int:
    """Replace a module's forward where it has the parts and computes the same; of how many.

    Norms and gated layers stand for their kind; layers may differ in how they attend, so each is tried.
    """
    same: dict[tuple[type, int], bool] = {}
    count = 0
    for module in model.modules():
        forward, width = _replacement(module)
        if forward is None:
            continue
        kind = type(module), width
        if kind not in same or isinstance(forward, _AttentionForward):
            same[kind] = _same(module, forward, width)
        if same[kind]:
            module.forward = forward
            count += 1
    return count


def _replacement(module: Any) -> tuple[Callable[..., Any] | None, int]:
    """What may take its forward's place, and the width of its input."""
    if _linear_parts(module, _ATTENTION_PARTS) and not _has_window(module):
        return _AttentionForward(module), int(module.q_proj.in_features)
    parts = _linear_parts(module, _PARTS)
    if parts and all(part.bias is None for part in parts):
        return _GatedForward(module), int(parts[0].in_features)
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and isinstance(eps, float):
        return _NormForward(module, eps), weight.shape[-1]
    return None, 0


def _has_window(module: Any) -> bool:
    return any(getattr(place, "sliding_window", None) for place in (module, getattr(module, "config", None)))


def _linear_parts(module: Any, names: Sequence[str]) -> list[nn.Linear]:
    """The layers of these names, or nothing where one is missing or another kind of layer."""
    parts = [part for part in (getattr(module, name, None) for name in names) if type(part) is nn.Linear]
    return parts if len(parts) == len(names) else []


def _same(module: Any, forward: Callable[..., Any], width: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(next(module.parameters()))

    given, more = drawn(1, 4, width), dict[str, Any]()
    try:
        if isinstance(forward, _AttentionForward):
            given *= (module.q_proj(given).std() * module.k_proj(given).std()).rsqrt()  # scores that matter
            angles = drawn(1, 4, module.head_dim // 2).repeat(1, 1, 2)
            layout = Layout([Group(0, 4, [4], None)], [])
            more = {"position_embeddings": (angles.cos(), angles.sin()), "packing": layout}
            more["attention_mask"] = None
        own, other = module(given, **more), forward(given, **more)
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes more, or lacks a part
        return False
    if isinstance(own, tuple):
        own, other = own[0], other[0]
    if own.shape != other.shape or not own.norm() > 0:  # of zeros nothing can be told
        return False
    return bool((own - other).norm() <= EQUAL * own.norm())
