"""Keys and values of rows that come and go, in blocks of rows, each as wide as its longest row needs.

A block lies without gaps, for torch copies a part of a wider tensor before it multiplies it. Rows are dense;
those that came first stand first. Where one leaves, the longest of each later block moves a block forward,
so that rows of a block stay alike in length and little of it is padding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Block:
    """Of each layer keys and values, [2, rows, K, columns, D]."""

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers
        self.rows, self.columns = layers[0].shape[1], layers[0].shape[3]

    def resize(self, rows: int, columns: int) -> None:
        """Keep what fits; a layer at a time, so that little is held twice."""
        kept, width = min(rows, self.rows), min(columns, self.columns)
        for number, old in enumerate(self.layers):
            new = old.new_empty(2, rows, old.shape[2], columns, old.shape[4])
            new[:, :kept, :, :width] = old[:, :kept, :, :width]
            # Zeros, for what lies beyond a row's end is multiplied by 0 and must be finite.
            new[:, :kept, :, width:] = 0
            new[:, kept:] = 0
            self.layers[number] = new
        self.rows, self.columns = rows, columns

    def first(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows, [rows K, columns, D] each."""
        keys, values = self.layers[layer].unbind(0)
        return keys[:rows].flatten(0, 1), values[:rows].flatten(0, 1)


class Store:
    """Rows 0 to `count`, of `lengths` tokens."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, like: Tensor, *, rows: int, columns: int
    ) -> None:
        self.empty = [like.new_zeros(2, 0, heads, 0, head_dim)] * layers
        self.rows = rows  # of a block, at most
        self.step = columns  # widths are multiples of it
        self.blocks: list[Block] = []
        self.lengths = np.zeros(0, dtype=np.int64)

    @property
    def count(self) -> int:
        return len(self.lengths)

    def append(self, length: int) -> int:
        """The number of a new last row, which has room for so many tokens."""
        row = self.count
        self.lengths = np.append(self.lengths, length)
        if row == len(self.blocks) * self.rows:
            self.blocks.append(Block(list(self.empty)))
        self._make_room(row, length)
        return row

    def put(self, layer: int, row: int, key: Tensor, value: Tensor) -> None:
        """The first tokens of a row, [K, T, D]."""
        numbers = self.blocks[row // self.rows].layers[layer][:, row % self.rows, :, : key.shape[1]]
        numbers[0], numbers[1] = key, value

    def close(self, row: int) -> list[tuple[int, int]]:
        """A row leaves: which others moved where, in this order, so that rows are dense again."""
        moves = []
        while row < self.count - 1:
            begin = (row // self.rows + 1) * self.rows
            later = self.lengths[begin : begin + self.rows]
            source = begin + int(later.argmax()) if len(later) else self.count - 1
            self._move(source, row)
            moves.append((source, row))
            row = source
        self.lengths = self.lengths[:-1]
        del self.blocks[-(-self.count // self.rows) :]
        return moves

    def fit(self, more: int = 0) -> None:
        """Make each block as wide as its longest row with `more` tokens needs."""
        for number, block in enumerate(self.blocks):
            lengths = self.lengths[number * self.rows : (number + 1) * self.rows]
            columns = self._wide(int(lengths.max()) + more)
            if columns != block.columns:
                block.resize(len(lengths), columns)

    def _wide(self, length: int) -> int:
        return max(-(-length // self.step), 1) * self.step

    def _make_room(self, row: int, length: int) -> None:
        block = self.blocks[row // self.rows]
        rows = block.rows if row % self.rows < block.rows else self.rows
        columns = max(block.columns, self._wide(length))
        if (rows, columns) != (block.rows, block.columns):
            block.resize(rows, columns)

    def _move(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        self._make_room(target, length)
        one, other = (self.blocks[row // self.rows].layers for row in (source, target))
        for old, new in zip(one, other, strict=True):
            new[:, target % self.rows, :, :length] = old[:, source % self.rows, :, :length]
        self.lengths[target] = length


def beyond(lengths: np.ndarray, columns: int, heads: int, like: Tensor) -> Tensor | None:
    """-inf where a row has no token, else 0, [rows K, 1, columns]; None where each has all."""
    if (lengths == columns).all():
        return None
    past = torch.arange(columns) >= torch.from_numpy(lengths).unsqueeze(1)
    mask = torch.zeros(past.shape, dtype=like.dtype).masked_fill_(past, -torch.inf)
    return mask.repeat_interleave(heads, 0).unsqueeze(1).to(like.device)
