"""Keys and values of answers being decoded: a prompt's once for its samples, each answer's own beside it.

An answer attends to both parts apart. With s = q k^T over a part's columns, l = log sum exp(s) and o what
that part alone gives, attention over both is o + (o' - o) sigmoid(l' - l). All queries that read a prompt, of
its samples and of the G query heads of a key head, are rows of one product. The prompt of a single answer is
a part of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rein.engines.kv_store import Block, Store, beyond

ANSWERS, PROMPTS = 32, 16  # attended to together on a CPU; elsewhere all of them, for the fewest kernels
ANSWER_COLUMNS, PROMPT_COLUMNS = 32, 16  # widths are multiples of these
ALONE = -1  # the prompt row of an answer that shares none


@dataclass(frozen=True, slots=True)
class Part:
    """One block in one step."""

    block: Block
    rows: int  # of the block
    begin: int  # and of the queries
    end: int
    mask: Tensor | None
    at: Tensor | None = None  # where new keys and values go: [rows 2 K]


@dataclass(frozen=True, slots=True)
class Frame:
    """What every layer of one step shares."""

    own: list[Part]
    shared: list[Part]
    asking: Tensor  # queries in the order of `shared`, as rows of [B K]
    answered: Tensor  # [B K]: where in that order
    alone: Tensor | None  # [B K, 1, 1]: True where no prompt is shared


class Cache:
    def __init__(self, layers: int, places: int, key_heads: int, head_dim: int, like: Tensor) -> None:
        self.heads, self.head_dim = key_heads, head_dim
        self.like, self.device = like, like.device
        on_cpu = like.device.type == "cpu"
        shape = (layers, key_heads, head_dim, like)
        answers, prompts = (_even(places, most if on_cpu else places) for most in (ANSWERS, PROMPTS))
        self.own = Store(*shape, rows=answers, columns=ANSWER_COLUMNS)
        self.prompts = Store(*shape, rows=prompts, columns=PROMPT_COLUMNS)
        self.prompt_of = np.zeros(0, dtype=np.int64)  # of each answer, its row in `prompts`

    def begin(self, prompt: int, length: int = 0) -> int:
        """The place of a new answer with `length` tokens of its own and a row of `prompts` or ALONE."""
        self.prompt_of = np.append(self.prompt_of, prompt)
        return self.own.append(length)

    def close(self, place: int) -> list[tuple[int, int]]:
        """An answer leaves: which others moved where, in this order."""
        moves = self.own.close(place)
        for source, target in moves:
            self.prompt_of[target] = self.prompt_of[source]
        self.prompt_of = self.prompt_of[:-1]
        return moves

    def close_prompt(self, row: int) -> list[tuple[int, int]]:
        """No answer reads it any more: which other prompts moved where."""
        moves = self.prompts.close(row)
        for source, target in moves:
            self.prompt_of[self.prompt_of == source] = target
        return moves

    def frame(self) -> Frame:
        """For one more token in each place, which has it from now on."""
        self.own.fit(1)
        self.prompts.fit()
        own = [self._own_part(number) for number in range(len(self.own.blocks))]
        self.own.lengths += 1
        shared, asking, answered = self._readers()
        alone = np.repeat(self.prompt_of == ALONE, self.heads)
        return Frame(
            own,
            shared,
            torch.from_numpy(asking).to(self.device),
            torch.from_numpy(answered).to(self.device),
            torch.from_numpy(alone).view(-1, 1, 1).to(self.device) if alone.any() else None,
        )

    def _readers(self) -> tuple[list[Part], np.ndarray, np.ndarray]:
        """Parts and orders of a Frame: in a block every prompt has room for as many answers as any of its."""
        size, count, heads = self.prompts.rows, self.prompts.count, np.arange(self.heads)
        shares = np.flatnonzero(self.prompt_of != ALONE)
        prompts = self.prompt_of[shares]
        answers = np.maximum(np.bincount(prompts, minlength=count), 1)
        firsts = np.arange(0, count, size)
        room = np.repeat(np.maximum.reduceat(answers, firsts), size)[:count] if count else answers
        ends = np.cumsum(room * self.heads)
        order = np.argsort(prompts, kind="stable")
        slots = np.empty_like(order)
        slots[order] = np.arange(len(order)) - np.searchsorted(prompts[order], prompts[order])
        at = (ends - room * self.heads)[prompts] + slots
        at = at[:, None] + heads * room[prompts][:, None]
        answered = np.zeros((len(self.prompt_of), self.heads), dtype=np.int64)
        answered[shares] = at
        asking = np.zeros(ends[-1] if count else 0, dtype=np.int64)
        asking[at] = shares[:, None] * self.heads + heads
        parts, begin = [], 0
        for first, block in zip(firsts, self.prompts.blocks, strict=True):
            lengths = self.prompts.lengths[first : first + size]
            end = int(ends[first + len(lengths) - 1])
            mask = beyond(lengths, block.columns, self.heads, self.like)
            parts.append(Part(block, len(lengths), begin, end, mask))
            begin = end
        return parts, asking, answered.ravel()

    def _own_part(self, number: int) -> Part:
        block, first = self.own.blocks[number], number * self.own.rows
        lengths = self.own.lengths[first : first + self.own.rows]
        halves = np.arange(2)[:, None] * block.rows * self.heads + np.arange(self.heads)  # keys, values
        rows = halves + np.arange(len(lengths))[:, None, None] * self.heads
        at = torch.from_numpy((rows * block.columns + lengths[:, None, None]).ravel()).to(self.device)
        mask = beyond(lengths + 1, block.columns, self.heads, self.like)
        begin, end = first * self.heads, (first + len(lengths)) * self.heads
        return Part(block, len(lengths), begin, end, mask, at)

    def attend(self, number: int, frame: Frame, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax(q k^T) v over each place's columns, with the new ones: q [B K, G, D], k and v [B, K, D]."""
        new = torch.cat([key, value], 1).view(-1, self.head_dim)
        out = torch.empty_like(query)
        sums = []
        for part in frame.own:
            assert part.at is not None
            flat = part.block.layers[number].view(-1, self.head_dim)
            flat.index_copy_(0, part.at, new[2 * part.begin : 2 * part.end])
            cut = slice(part.begin, part.end)
            sums.append(_attend(part, number, query[cut], out[cut], bool(frame.shared)))
        if not frame.shared:
            return out
        return self._with_prompts(number, frame, query, out, torch.cat(sums))

    def _with_prompts(self, number: int, frame: Frame, query: Tensor, out: Tensor, own: Tensor) -> Tensor:
        """`own`: log-sums of the own part, [B K, G, 1], whose attention is `out`."""
        groups = query.shape[1]
        asking = query.index_select(0, frame.asking)
        read, sums = torch.empty_like(asking), []
        for part in frame.shared:
            one, other = (
                t[part.begin : part.end].view(part.rows * self.heads, -1, self.head_dim)
                for t in (asking, read)
            )
            sums.append(_attend(part, number, one, other, True).view(-1, groups, 1))
        share = torch.sigmoid(torch.cat(sums).index_select(0, frame.answered) - own)
        if frame.alone is not None:
            share.masked_fill_(frame.alone, 0)
        return out.lerp_(read.index_select(0, frame.answered), share.to(out.dtype))


def _attend(part: Part, number: int, query: Tensor, out: Tensor, with_sums: bool) -> Tensor:
    """Write attention over a block to `out`; log sum exp of the scores, [rows, queries, 1], if asked for.

    It is the likeliest column's score less the log of its weight, in float32 or wider.
    """
    keys, values = part.block.first(number, part.rows)
    if part.mask is None:
        scores = torch.bmm(query, keys.transpose(1, 2))
    else:
        scores = torch.baddbmm(part.mask, query, keys.transpose(1, 2))
    if not with_sums:
        torch.bmm(scores.softmax(-1), values, out=out)
        return scores
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = scores.softmax(-1)
    torch.bmm(weights.to(out.dtype), values, out=out)
    return scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log_()


def _even(places: int, most: int) -> int:
    """Rows of a block when so many places are cut into the fewest blocks of like size."""
    return -(-places // -(-places // most))
