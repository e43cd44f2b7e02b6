"""Ulysses sequence parallelism: each of S ranks holds an Sth of a pack's positions, and in attention an Sth
of the heads over all of them (Jacobs et al. 2023, arXiv:2309.14509).

Everything but attention works position by position, so a slice needs nothing else. Log-probs and values of a
rank's own positions are added up to the whole pack's, on every rank of the S.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rein.models.packing import Packed


class Group(Protocol):
    """The ranks that share a pack."""

    rank: int
    world_size: int

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        ...

    def exchange(self, parts: Tensor) -> Tensor:
        """[S, ...]: the ith goes to the ith rank, whose own comes in its place."""
        ...


class Slices:
    """The ranks that share a pack, and which slice is this one's."""

    def __init__(self, group: Group) -> None:
        self.group, self.size, self.index = group, group.world_size, group.rank

    def cut(self, packed: Packed) -> Packed:
        """This rank's slice of a pack, filled up to equal length; positions count from where it begins."""
        tokens = packed.input_ids.shape[1]
        length = -(-tokens // self.size)
        begin = self.index * length
        filled = (0, length * self.size - tokens)
        own = (packed.states >= begin) & (packed.states < begin + length)
        if not own.any():  # a pass that reads no head would leave the other ranks waiting for its gradient
            own[0] = True
        here = packed.states[own]
        inside = (here >= begin) & (here < begin + length)
        return replace(
            packed,
            input_ids=pad(packed.input_ids, filled)[:, begin : begin + length],
            position_ids=pad(packed.position_ids, filled)[:, begin : begin + length],
            layout=replace(packed.layout, slices=self, tokens=tokens),
            states=(here - begin).where(inside, 0),
            targets=packed.targets[own],
            row=packed.row[own],
            column=packed.column[own],
            counts=inside,
        )

    def join(self, values: Tensor) -> Tensor:
        """The sum over the slices; each rank's gradient is of its own part."""
        found: Tensor = _Join.apply(values, self.group)  # type: ignore[no-untyped-call]
        return found

    def heads(self, x: Tensor, tokens: int) -> Tensor:
        """[n, H, D] of a slice -> [tokens, H / S, D] of the pack."""
        found: Tensor = _Heads.apply(x, self)  # type: ignore[no-untyped-call]
        return found[:tokens]

    def positions(self, x: Tensor) -> Tensor:
        """[tokens, H / S, D] of the pack -> [n, H, D] of a slice."""
        short = -len(x) % self.size
        found: Tensor = _Positions.apply(pad(x, (0, 0, 0, 0, 0, short)), self)  # type: ignore[no-untyped-call]
        return found

    def repeats(self, key_heads: int) -> int:
        """How often a key head is repeated so that ranks get equally many."""
        return self.size // math.gcd(key_heads, self.size)

    def to_heads(self, x: Tensor) -> Tensor:
        n, heads, size = x.shape
        parts = x.view(n, self.size, heads // self.size, size).transpose(0, 1).contiguous()
        return self.group.exchange(parts).flatten(0, 1)

    def to_positions(self, x: Tensor) -> Tensor:
        parts = x.contiguous().view(self.size, -1, *x.shape[1:])
        return self.group.exchange(parts).transpose(0, 1).flatten(1, 2)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return slices.to_heads(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.to_positions(grad), None


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.slices = slices
        return slices.to_positions(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slices.to_heads(grad.contiguous()), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        return group.add(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
