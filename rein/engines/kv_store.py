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
    """`rows` rows; of each layer the keys, then the values."""

    def __init__(self, numbers: Tensor) -> None:  # [layers, 2, rows, K, columns, D]
        self.numbers = numbers
        self.columns = numbers.shape[4]
        self.keys, self.values = ([layer[i].flatten(0, 1) for layer in numbers] for i in (0, 1))
        self.flat = [layer.view(-1, numbers.shape[-1]) for layer in numbers]


class Store:
    """Rows 0 to `count`, of `lengths` tokens."""

    def __init__(
        self, layers: int, heads: int, head_dim: int, like: Tensor, *, rows: int, columns: int
    ) -> None:
        self.layers, self.heads, self.head_dim, self.like = layers, heads, head_dim, like
        self.rows = rows  # of a block
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
            self.blocks.append(Block(self._zeros(self._wide(length))))
        self._make_room(row // self.rows, length)
        return row

    def put(self, layer: int, row: int, key: Tensor, value: Tensor) -> None:
        """The first tokens of a row, [K, T, D]."""
        block, inside = self.blocks[row // self.rows], row % self.rows
        block.numbers[layer, 0, inside, :, : key.shape[1]] = key
        block.numbers[layer, 1, inside, :, : key.shape[1]] = value

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
        """Each block as wide as its longest row with `more` tokens needs."""
        for number, block in enumerate(self.blocks):
            longest = int(self.lengths[number * self.rows : (number + 1) * self.rows].max())
            columns = self._wide(longest + more)
            if columns != block.columns:
                self._resize(number, columns)

    def _wide(self, length: int) -> int:
        return max(-(-length // self.step), 1) * self.step

    def _make_room(self, number: int, length: int) -> None:
        if length > self.blocks[number].columns:
            self._resize(number, self._wide(length))

    def _resize(self, number: int, columns: int) -> None:
        old = self.blocks[number].numbers
        numbers, kept = self._zeros(columns), min(columns, old.shape[4])
        numbers[:, :, :, :, :kept] = old[:, :, :, :, :kept]
        self.blocks[number] = Block(numbers)

    def _zeros(self, columns: int) -> Tensor:
        # Zeros, for what lies beyond a row's end is multiplied by 0 and must be finite.
        return self.like.new_zeros(self.layers, 2, self.rows, self.heads, columns, self.head_dim)

    def _move(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        self._make_room(target // self.rows, length)
        one, other = (
            self.blocks[row // self.rows].numbers[:, :, row % self.rows] for row in (source, target)
        )
        other[:, :, :, :length] = one[:, :, :, :length]
        self.lengths[target] = length


def beyond(lengths: np.ndarray, columns: int, heads: int, like: Tensor) -> Tensor | None:
    """-inf where a row has no token, else 0, [rows K, 1, columns]; None where each has all."""
    if (lengths == columns).all():
        return None
    past = torch.arange(columns) >= torch.from_numpy(lengths).unsqueeze(1)
    mask = torch.zeros(past.shape, dtype=like.dtype).masked_fill_(past, -torch.inf)
    return mask.repeat_interleave(heads, 0).unsqueeze(1).to(like.device)
