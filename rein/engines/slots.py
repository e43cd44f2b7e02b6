"""Continuous batching: the first places of a cache are always busy while answers are asked for.

A place whose answer ends is given to the next in the queue; once the queue is empty the last place moves
into the gap, so that a step never computes what nobody asked for. All of a prompt but its last token is
read once for its answers; that token is each answer's first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rein.engines.board import Ask, Board, Manner
from rein.engines.fused import Fused, KeysValues
from rein.types import Completion

READ_TOKENS = 4096  # of prompts, in one forward
START_COLUMNS = 64  # beyond the longest prompt, before the cache first grows


def decode(
    model: Any,
    asks: list[Ask],  # in the order they are begun, the samples of a prompt beside each other
    places: int,
    manner: Manner,
    answers: list[list[Completion | None]],  # [prompts][n], filled
    ended: Callable[[Ask], None],  # told of each answer
) -> None:
    """Write all answers, `places` at a time."""
    _Slots(model, asks, min(places, len(asks)), manner).run(answers, ended)


class _Slots:
    def __init__(self, model: Any, asks: list[Ask], places: int, manner: Manner) -> None:
        self.queue = deque(asks)
        self.board = Board(manner, places, max(ask.room for ask in asks))
        longest = max(len(ask.prompt_ids) for ask in asks)
        room = min(START_COLUMNS, max(ask.room for ask in asks))
        self.fused = Fused(model, places, longest + room)
        self.busy = 0  # places in use: the first ones
        self.lengths = np.zeros(places, dtype=np.int64)  # tokens in the cache
        self.last = np.zeros(places, dtype=np.int64)  # the token to be read next
        self.kept: tuple[int, list[KeysValues]] = -1, []  # the last prompt read, for samples that come later

    def run(self, answers: list[list[Completion | None]], ended: Callable[[Ask], None]) -> None:
        gaps = list(range(len(self.lengths)))
        self.busy = len(gaps)
        while True:
            self._fill(gaps)
            if self.busy == 0:
                return
            places = np.arange(self.busy)
            self.fused.cache.widen(int(self.lengths[places].max()) + 1)
            logits = self.fused.step(torch.from_numpy(self.last[places]), self.lengths[places])
            chosen, done = self.board.write(places, logits)
            self.last[places] = chosen.cpu().numpy()
            self.lengths[places] += 1
            gaps = done.nonzero()[0].tolist()
            for place in gaps:
                ended(self.board.take(place, answers))

    def _fill(self, gaps: list[int]) -> None:
        """Begin the next answers in the gaps; close those that are left."""
        begun: dict[int, list[int]] = {}  # prompt -> places
        prompts: dict[int, np.ndarray] = {}
        taken = min(len(gaps), len(self.queue))
        for place in gaps[:taken]:
            ask = self.queue.popleft()
            self.board.enter(place, ask)
            self.lengths[place], self.last[place] = len(ask.prompt_ids) - 1, ask.prompt_ids[-1]
            begun.setdefault(ask.prompt, []).append(place)
            prompts[ask.prompt] = ask.prompt_ids[:-1]
        self._read(prompts, begun)
        for place in reversed(gaps[taken:]):
            self.busy -= 1
            if place != self.busy:
                self.board.move(self.busy, place)
                self.fused.cache.move(self.busy, place, int(self.lengths[self.busy]))
                self.lengths[place], self.last[place] = self.lengths[self.busy], self.last[self.busy]

    def _read(self, prompts: dict[int, np.ndarray], begun: dict[int, list[int]]) -> None:
        number, kept = self.kept
        if number in begun:
            for layer, (key, value) in enumerate(kept):
                self.fused.cache.put(layer, begun[number], key, value)
        batch: list[int] = []
        rest = [prompt for prompt in begun if prompt != number and len(prompts[prompt])]
        for i, prompt in enumerate(rest):
            batch.append(prompt)
            tokens = sum(len(prompts[some]) for some in batch)
            if i + 1 == len(rest) or tokens + len(prompts[rest[i + 1]]) > READ_TOKENS:
                last = self.fused.read([prompts[some] for some in batch], [begun[some] for some in batch])
                self.kept, batch = (prompt, last), []
