"""How a model computes: `exact`, in the precision of its weights, or `fast`, in bfloat16 beside them.

In `fast` the parameters stay float32: they are what is trained, saved and kept in snapshots. The trunk reads
bfloat16 copies of them, made anew when they have moved; each copy's gradient is added to its parameter's in
float32. The head (`lm_head`, `score`) reads the parameters themselves, and norms and softmaxes are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

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


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside, float32 matrix products of this process are of this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def quickest_float32() -> None:
    """Let this process take the quickest matrix products that are float32's."""
    torch.set_float32_matmul_precision("medium" if medium_is_float32() else "highest")


class HalfCopies:
    """The bfloat16 copies that a trunk reads in the place of its parameters.

    An attribute of a module's own hides its parameter of that name from `self.weight`, and from nothing else:
    `parameters()` and `state_dict()` still give the parameter.
    """

    def __init__(self, model: nn.Module, heads: list[nn.Module], shared: HalfCopies | None = None) -> None:
        known = {} if shared is None else shared.copies
        beside = {id(module) for head in heads for module in head.modules()}
        self.copies: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self.places: list[tuple[nn.Module, str, Tensor]] = []
        for module in model.modules():
            if id(module) in beside:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self.copies:
                    pair = known.get(id(parameter)) or (parameter, _copy_of(parameter))
                    self.copies[id(parameter)] = pair
                self.places.append((module, name, self.copies[id(parameter)][1]))
        self.seen = [parameter._version for parameter, _ in self.copies.values()]
        self.put()

    def put(self) -> None:
        for module, name, copy in self.places:
            module.__dict__[name] = copy

    def take_away(self) -> None:
        for module, name, _ in self.places:
            module.__dict__.pop(name, None)

    @torch.no_grad()
    def refresh(self, *_: Any) -> None:
        """Cast what has moved since the last forward pass."""
        for i, (parameter, copy) in enumerate(self.copies.values()):
            if parameter._version != self.seen[i]:
                copy.copy_(parameter)
                self.seen[i] = parameter._version


def _copy_of(parameter: nn.Parameter) -> Tensor:
    """A bfloat16 leaf whose gradients go to the parameter, in float32."""
    copy = parameter.detach().to(torch.bfloat16).requires_grad_(parameter.requires_grad)

    def pass_on(leaf: Tensor) -> None:
        assert leaf.grad is not None
        if parameter.grad is None:
            parameter.grad = leaf.grad.float()
        else:
            parameter.grad.add_(leaf.grad)
        leaf.grad = None

    if parameter.requires_grad:
        copy.register_post_accumulate_grad_hook(pass_on)  # type: ignore[no-untyped-call]
    return copy


def make_fast(
    model: Any, trunk: nn.Module, heads: list[nn.Module], *, shared: HalfCopies | None = None
) -> None:
    """Let a float32 model's trunk compute in bfloat16 from now on, wherever it is called from.

    `shared`: another model's copies, which are taken for the parameters that are its too.
    """
    model.half_copies = copies = HalfCopies(model, heads, shared)
    trunk.register_forward_pre_hook(copies.refresh)
    for head in heads:
        head.register_forward_pre_hook(_widened)


def _widened(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0].float(), *args[1:])


def is_fast(model: nn.Module) -> bool:
    return hasattr(model, "half_copies")


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
