"""Keys and values of answers being decoded: allocated once, wider when an answer needs it.

Keys lie transposed, [D, columns], so that both products of attention are plain batched matrix products over
the columns in use; the G query heads of a key head are rows of one product. Places are attended to in
blocks, each as wide as its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 8  # places attended to together on a CPU; elsewhere all of them, for the fewest kernels
GROWTH = 1.5


@dataclass(frozen=True, slots=True)
class Frame:
    """What every layer of one step shares."""

    keys_at: Tensor  # [B K D], where the new numbers go
    values_at: Tensor  # [B K]
    blocks: list[tuple[int, int, int, Tensor | None]]  # rows of the cache from and to, columns, 0 or -inf


class Cache:
    """`layers` times keys [places K, D, columns] and values [places K, columns, D]."""

    def __init__(
        self,
        layers: int,
        places: int,
        key_heads: int,
        head_dim: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.heads, self.head_dim, self.columns = key_heads, head_dim, columns
        self.device, self.dtype = device, dtype
        rows = places * key_heads
        # Zeros, for what lies beyond an answer's end is multiplied by 0 and must be finite.
        self.keys = [self._zeros(rows, head_dim, columns) for _ in range(layers)]
        self.values = [self._zeros(rows, columns, head_dim) for _ in range(layers)]
        self.block = BLOCK if device.type == "cpu" else places

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def widen(self, columns: int) -> None:
        """Make room for answers of `columns` tokens, prompt and all."""
        if columns <= self.columns:
            return
        old, self.columns = self.columns, max(columns, int(self.columns * GROWTH))
        for number in range(len(self.keys)):
            keys, values = self.keys[number], self.values[number]
            self.keys[number] = self._zeros(len(keys), self.head_dim, self.columns)
            self.keys[number][:, :, :old] = keys
            self.values[number] = self._zeros(len(values), self.columns, self.head_dim)
            self.values[number][:, :old] = values

    def put(self, number: int, places: Sequence[int], key: Tensor, value: Tensor) -> None:
        """A prompt's keys and values, [K, T, D], at each of `places`."""
        length = key.shape[1]
        for place in places:
            rows = slice(place * self.heads, (place + 1) * self.heads)
            self.keys[number][rows, :, :length] = key.transpose(1, 2)
            self.values[number][rows, :length] = value

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a place's first `length` columns to another."""
        one, other = (slice(place * self.heads, (place + 1) * self.heads) for place in (source, target))
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[other, :, :length] = keys[one, :, :length]
            values[other, :length] = values[one, :length]

    def frame(self, lengths: np.ndarray) -> Frame:
        """For the first B places, which hold `lengths` tokens and get one more."""
        ends = torch.from_numpy(lengths).to(self.device)
        rows = torch.arange(len(lengths) * self.heads, device=self.device)
        ends = ends.repeat_interleave(self.heads)
        inside = torch.arange(self.head_dim, device=self.device) * self.columns
        keys_at = (rows * self.head_dim * self.columns + ends).unsqueeze(1) + inside
        blocks = []
        for begin in range(0, len(lengths), self.block):
            some = lengths[begin : begin + self.block]
            width, one, other = int(some.max()) + 1, begin * self.heads, (begin + len(some)) * self.heads
            mask = None
            if some.min() != some.max():
                beyond = torch.arange(width, device=self.device) > ends[one:other, None]
                mask = torch.zeros((other - one, 1, width), dtype=self.dtype, device=self.device)
                mask.masked_fill_(beyond.unsqueeze(1), -torch.inf)
            blocks.append((one, other, width, mask))
        return Frame(keys_at.flatten(), rows * self.columns + ends, blocks)

    def attend(self, number: int, frame: Frame, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q k^T) v over each place's columns, with the new ones: q [B K, G, D], k and v [B, K, D]."""
        keys, values = self.keys[number], self.values[number]
        keys.view(-1).index_copy_(0, frame.keys_at, key.reshape(-1))
        values.view(-1, self.head_dim).index_copy_(0, frame.values_at, value.reshape(-1, self.head_dim))
        out = torch.empty_like(query)
        for begin, end, width, mask in frame.blocks:
            q, k = query[begin:end], keys[begin:end, :, :width]
            scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
            torch.bmm(scores.softmax(-1), values[begin:end, :width], out=out[begin:end])
        return out
