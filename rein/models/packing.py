"""Rows laid end to end without padding, and where each response token's state lies in the pack.

B rows become one sequence of N tokens; positions restart at each row. With `share`, a prompt that several
rows answer lies there once, and their answers are segments of their own that go on from its end. Attention
needs segments apart: `layout` says which pack positions form each, so that it runs on small [rows, length]
blocks, and which segments also read a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rein.sharing import families
from rein.types import TokenRow

if TYPE_CHECKING:
    from rein.models.ulysses import Slices

GROUP_WASTE = 0.2  # a block may hold this share of padding before another block is opened


@dataclass(frozen=True, slots=True)
class Group:
    """Segments whose causal attention runs as one block of `rows` x `length`, by ascending length."""

    start: int  # first pack position of the group; its segments follow each other
    stop: int
    lengths: Sequence[int]
    scatter: Tensor | None  # [stop - start] block position of each pack position; None: no padding

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        """The longest."""
        return self.lengths[-1]


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """A prompt at start:stop, read whole by every position of own_start:own_stop, its rows' answers."""

    start: int
    stop: int
    own_start: int
    own_stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What attention needs to know of a pack."""

    groups: list[Group]  # in the order of their positions; they cover the pack
    prompts: list[SharedPrompt]
    slices: Slices | None = None  # the ranks that share the pack's positions
    tokens: int = 0  # N, where they do
    made: dict[str, Any] = field(default_factory=dict)  # for the kernels of a GPU, once for all layers

    @property
    def lengths(self) -> list[int]:
        """Of the segments, in the order of their positions."""
        return [length for group in self.groups for length in group.lengths]

    def begins(self, device: torch.device) -> Tensor:
        """[segments + 1] int32, the pack position that each begins at, and the end."""
        if "begins" not in self.made:
            ends = np.cumsum([0, *self.lengths], dtype=np.int32)
            self.made["begins"] = torch.from_numpy(ends).to(device)
        found: Tensor = self.made["begins"]
        return found


@dataclass(frozen=True, slots=True)
class Packed:
    """One pack, or a rank's slice of one. R counts response tokens of all rows, or those of the slice."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    layout: Layout
    states: Tensor  # [R] pack position of the state before each response token
    last: Tensor  # [B] pack position of each row's last token
    targets: Tensor  # [R] the response token ids
    row: Tensor  # [R]
    column: Tensor  # [R]
    shape: tuple[int, int]  # B, T
    counts: Tensor | None = None  # [R] of a slice: whether it is there for its value

    def spread(self, values: Tensor) -> Tensor:
        """[R] -> [B, T], on the CPU; 0 where a row has no token. Of a slice: of the whole pack."""
        if self.counts is not None:
            values = values.where(self.counts, 0)
        found = values.new_zeros(self.shape).index_put((self.row, self.column), values)
        return (found if self.layout.slices is None else self.layout.slices.join(found)).cpu()


def pack(rows: Sequence[TokenRow], device: torch.device | str = "cpu", *, share: bool = False) -> Packed:
    """Lay rows end to end, segments of like length beside each other; the answer's order is the rows'."""
    places, layout, order = _laid_out(rows, device, share)
    lengths = [len(row.response_ids) for row in rows]
    ids = np.zeros(1 + max(int(place[-1]) for place in places), dtype=np.int64)
    positions = np.zeros_like(ids)
    for row, place in zip(rows, places, strict=True):
        ids[place] = np.concatenate([row.prompt_ids, row.response_ids])
        positions[place] = np.arange(len(place))

    def tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Packed(
        input_ids=tensor([ids]).unsqueeze(0),
        position_ids=tensor([positions]).unsqueeze(0),
        layout=layout,
        states=tensor([places[i][len(places[i]) - lengths[i] - 1 : -1] for i in order]),
        last=tensor([place[-1:] for place in places]),
        targets=tensor([rows[i].response_ids for i in order]),
        row=tensor([np.full(lengths[i], i) for i in order]),
        column=tensor([np.arange(lengths[i]) for i in order]),
        shape=(len(rows), max(lengths)),
    )


def _laid_out(
    rows: Sequence[TokenRow], device: torch.device | str, share: bool
) -> tuple[list[np.ndarray], Layout, list[int]]:
    """The pack positions of each row's tokens, [P + T]; the layout; the rows as they come in the pack."""
    together = families(rows) if share else [[i] for i in range(len(rows))]
    whole = [family[0] for family in together if len(family) == 1]
    shared = [family for family in together if len(family) > 1]
    first = [(len(rows[i].prompt_ids) + len(rows[i].response_ids), [i]) for i in whole]
    first += [(len(rows[family[0]].prompt_ids), family) for family in shared]
    first.sort(key=lambda entry: (entry[0], entry[1][0]))
    groups, prompts, order = _groups([length for length, _ in first], 0, device), [], []
    places = [np.zeros(0, dtype=np.int64)] * len(rows)
    begin, end = 0, sum(length for length, _ in first)
    for length, family in first:
        prompt = np.arange(begin, begin + length)
        begin += length
        if len(family) == 1:
            places[family[0]] = prompt
            order += family
            continue
        own = sorted(family, key=lambda i: (len(rows[i].response_ids), i))
        lengths = [len(rows[i].response_ids) for i in own]
        groups += _groups([n for n in lengths if n], end, device)
        prompts.append(SharedPrompt(begin - length, begin, end, end + sum(lengths)))
        for i, n in zip(own, lengths, strict=True):
            places[i] = np.concatenate([prompt, np.arange(end, end + n)])
            end += n
        order += own
    return places, Layout(groups, [prompt for prompt in prompts if prompt.own_stop > prompt.own_start]), order


def _groups(lengths: list[int], offset: int, device: torch.device | str) -> list[Group]:
    """Cut ascending lengths, the first at pack position `offset`, into blocks of little padding."""
    groups: list[Group] = []
    begin, start = 0, offset
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
        groups.append(Group(start, start + tokens, members, scatter))
        begin, start = i + 1, start + tokens
    return groups
