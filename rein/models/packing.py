"""Rows laid end to end without padding, and where each response token's state lies in the pack.

B rows become one sequence of N tokens; positions restart at each row. Attention needs rows apart: `groups`
says, for rows of like length, which pack positions form each row, so that attention runs on small [rows,
length] blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rein.types import TokenRow

GROUP_WASTE = 0.2  # a block may hold this share of padding before another block is opened


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose attention runs as one block of `rows` x `length`."""

    start: int  # first pack position of the group; its rows follow each other
    stop: int
    rows: int
    length: int
    scatter: Tensor | None  # [stop - start] block position of each pack position; None: no padding


@dataclass(frozen=True, slots=True)
class Packed:
    """One pack. R counts response tokens of all rows."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    groups: list[Group]
    states: Tensor  # [R] pack position of the state before each response token
    last: Tensor  # [B] pack position of each row's last token
    targets: Tensor  # [R] the response token ids
    row: Tensor  # [R]
    column: Tensor  # [R]
    shape: tuple[int, int]  # B, T

    def spread(self, values: Tensor) -> Tensor:
        """[R] -> [B, T]; 0 where a row has no token."""
        return values.new_zeros(self.shape).index_put((self.row, self.column), values)


def pack(rows: Sequence[TokenRow], device: torch.device | str = "cpu") -> Packed:
    """Lay rows end to end, those of like length beside each other; the answer's order is the rows'."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], i))
    ids, states, row_index, column, targets = [], [], [], [], []
    last = np.zeros(len(rows), dtype=np.int64)
    offset = 0
    for i in order:
        prompt, response = rows[i].prompt_ids, rows[i].response_ids
        ids += [prompt, response]
        first = offset + len(prompt) - 1
        states.append(np.arange(first, first + len(response)))
        row_index.append(np.full(len(response), i))
        column.append(np.arange(len(response)))
        targets.append(response)
        offset += lengths[i]
        last[i] = offset - 1
    sorted_lengths = [lengths[i] for i in order]

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Packed(
        input_ids=tensor(ids).unsqueeze(0),
        position_ids=tensor([np.arange(n) for n in sorted_lengths]).unsqueeze(0),
        groups=_groups(sorted_lengths, device),
        states=tensor(states),
        last=torch.from_numpy(last).to(device),
        targets=tensor(targets),
        row=tensor(row_index),
        column=tensor(column),
        shape=(len(rows), max(len(row.response_ids) for row in rows)),
    )


def _groups(lengths: list[int], device: torch.device | str) -> list[Group]:
    """Cut ascending lengths into blocks of little padding."""
    groups: list[Group] = []
    begin = start = 0
    for i in range(len(lengths)):
        tokens = sum(lengths[begin : i + 1])
        is_last = i + 1 == len(lengths)
        block = (i + 2 - begin) * (lengths[i + 1] if not is_last else 0)
        if not is_last and (tokens + lengths[i + 1]) >= (1 - GROUP_WASTE) * block:
            continue
        members = lengths[begin : i + 1]
        longest = members[-1]
        scatter = None
        if members[0] != longest:
            places = np.concatenate([k * longest + np.arange(n) for k, n in enumerate(members)])
            scatter = torch.from_numpy(places).to(device)
        groups.append(Group(start, start + tokens, len(members), longest, scatter))
        begin, start = i + 1, start + tokens
    return groups
