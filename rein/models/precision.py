"""How a model computes: `exact`, in the precision of its weights, or `fast`, in bfloat16 beside them.

In `fast` the parameters stay float32: they are what is trained, saved and kept in snapshots. The trunk reads
bfloat16 copies of them, made anew when they have moved; each copy's gradient is added to its parameter's in
float32. Norms, softmaxes and sums are float32. A head's products (`lm_head`, `score`) are float32's, or of
bfloat16 factors with float32 sums where the chip is quicker at that.

In `exact` the gradients of large weights are made of bfloat16 halves where the chip is quicker at that
(`products.Split`). In both, a layer adds its gradient where it is summed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rein.matmul import matmul_precision
from rein.models.forwards import sum_in_place
from rein.models.products import Half, Plain, Product, Split, Wide, pays

FLOAT32_ERROR = 1e-5  # of a product, relative; float32 makes 1e-6, bfloat16 inside 2e-3


@functools.cache
def medium_is_float32() -> bool:
    """Whether matrix products of precision "medium" are float32's on this chip, measured against float64.

    "medium" lets oneDNN take them, which on AMD is twice as fast as MKL; where it rounds to bfloat16 inside
    (AMX), it is not for `exact`.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 512, generator=generator) for n in (256, 768))
    true = linear(x.double(), weight.double())
    with matmul_precision("medium"):
        found = linear(x, weight)
    return bool((found.double() - true).norm() < FLOAT32_ERROR * true.norm())


def quickest_float32(device: str = "cpu") -> None:
    """Let this process take the quickest matrix products that are float32's; on a GPU "medium" is TF32's."""
    medium = device == "cpu" and medium_is_float32()
    torch.set_float32_matmul_precision("medium" if medium else "highest")


class HalfCopies:
    """The bfloat16 copies that a trunk reads in the place of its parameters.

    An attribute of a module's own hides its parameter of that name from `self.weight`, and from nothing else:
    `parameters()` and `state_dict()` still give the parameter.
    """

    def __init__(self, model: nn.Module, heads: list[nn.Module], shared: HalfCopies | None = None) -> None:
        self.known = {} if shared is None else shared.copies
        beside = {id(module) for head in heads for module in head.modules()}
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.places: list[tuple[nn.Module, str, Tensor]] = []
        for module in model.modules():
            if id(module) in beside:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                self.places.append((module, name, self.of(parameter)))
            sum_in_place(module, _half)
        self.seen = {key: parameter._version for key, (parameter, _) in self.copies.items()}
        self.put()

    def of(self, parameter: Tensor) -> Tensor:
        """Its copy, the same for all that share it."""
        if id(parameter) not in self.copies:
            pair = self.known.get(id(parameter)) or (parameter, _copy_of(parameter))
            self.copies[id(parameter)] = pair
        return self.copies[id(parameter)][1]

    def put(self) -> None:
        for module, name, copy in self.places:
            module.__dict__[name] = copy

    def take_away(self) -> None:
        for module, name, _ in self.places:
            module.__dict__.pop(name, None)

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Cast what has moved since the last forward pass, or was released."""
        for key, (parameter, copy) in self.copies.items():
            if parameter._version != self.seen.get(key):
                if not copy.untyped_storage().size():
                    copy.untyped_storage().resize_(copy.numel() * copy.element_size())
                copy.copy_(parameter)
                self.seen[key] = parameter._version

    def release(self) -> None:
        """Give back the memory of the copies of what is trained, until the next refresh."""
        for key, (parameter, copy) in self.copies.items():
            if parameter.requires_grad:
                copy.untyped_storage().resize_(0)
                self.seen.pop(key, None)


def _copy_of(parameter: Tensor) -> Tensor:
    """A bfloat16 leaf whose gradients go to the parameter, in float32."""
    copy = parameter.detach().to(torch.bfloat16).requires_grad_(parameter.requires_grad)

    def pass_on(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # the step that read it has passed its gradient on
            return
        if parameter.grad is None:
            parameter.grad = grad.float()
        else:
            parameter.grad.add_(grad)

    if parameter.requires_grad:
        copy.register_post_accumulate_grad_hook(pass_on)  # type: ignore[no-untyped-call]
    return copy


def set_precision(
    model: Any, precision: str, trunk: nn.Module, heads: list[nn.Module], *, shared: Any = None
) -> None:
    """Let a model compute in `exact` or `fast` from now on, wherever it is called from.

    `shared`: another model, whose copies are taken for the parameters that are its too.
    """
    if precision == "fast":
        _make_fast(model, trunk, heads, None if shared is None else shared.half_copies)
    else:
        _make_exact(trunk, heads)


def _make_fast(model: Any, trunk: nn.Module, heads: list[nn.Module], shared: HalfCopies | None) -> None:
    model.half_copies = copies = HalfCopies(model, heads, shared)
    trunk.register_forward_pre_hook(copies.refresh)
    for head in heads:
        head.register_forward_pre_hook(_widened)
        if type(head) is nn.Linear and pays(head.weight):
            sum_in_place(head, _WideOf(copies.of(head.weight)))


def _make_exact(trunk: nn.Module, heads: list[nn.Module]) -> None:
    for module in trunk.modules():
        splits = type(module) is nn.Linear and pays(module.weight)
        sum_in_place(module, _split if splits else None)
    for head in heads:
        head.register_forward_pre_hook(_widened)  # blocks may be cast from outside
        sum_in_place(head)


def _half(layer: nn.Linear) -> Half:
    own = layer._parameters["weight"]
    assert own is not None
    return Half(layer.weight, own)


def _split(layer: nn.Linear) -> Product:
    """Plain of what FSDP2 has cast."""
    return Split(layer.weight) if layer.weight.dtype == torch.float32 else Plain(layer.weight)


class _WideOf:
    """A head's, of a copy that its trunk reads or would read."""

    def __init__(self, copy: Tensor) -> None:
        self.copy = copy

    def __call__(self, layer: nn.Linear) -> Wide:
        return Wide(self.copy, layer.weight)


def _widened(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a head reads, at least as wide as its weight."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return (args[0].to(torch.promote_types(args[0].dtype, weight.dtype)), *args[1:])


def is_fast(model: nn.Module) -> bool:
    return hasattr(model, "half_copies")


def half_copies(model: nn.Module) -> list[Tensor]:
    """The bfloat16 copies that it reads, if any."""
    return [copy for _, copy in model.half_copies.copies.values()] if is_fast(model) else []  # type: ignore[operator, union-attr]


def refresh_copies(model: nn.Module) -> None:
    """Let weights that are read otherwise than by a forward pass be those of now."""
    if is_fast(model):
        model.half_copies.refresh()  # type: ignore[operator, union-attr]


def release_copies(model: nn.Module) -> None:
    """Give back memory that the next forward pass takes again; the weights are about to move."""
    if is_fast(model):
        model.half_copies.release()  # type: ignore[operator, union-attr]


@contextmanager
def own_weights(model: nn.Module) -> Iterator[None]:
    """Inside, modules show their float32 parameters, for sums that are made of them."""
    copies = getattr(model, "half_copies", None)
    if copies is None:
        yield
        return
    copies.take_away()
    try:
        yield
    finally:
        copies.put()
