"""Continuous batching: the places of a cache are always busy while answers are asked for.

Where an answer ends others move up and the next in the queue begins behind them, so that a step never
computes what nobody asked for. All of a prompt but its last token is read once for its answers; that token is
each answer's first step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rein.engines.board import Ask, Board, Manner
from rein.engines.fused import Fused
from rein.engines.kv_cache import ALONE
from rein.engines.kv_store import Store
from rein.types import Completion

READ_TOKENS = 4096  # of prompts, in one forward


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
        self.places = places
        self.board = Board(manner, places, max(ask.room for ask in asks))
        self.fused = Fused(model, places)
        self.cache = self.fused.cache
        self.busy = 0  # places in use: the first ones
        self.positions = np.zeros(places, dtype=np.int64)  # of the token to be read next
        self.last = np.zeros(places, dtype=np.int64)  # that token
        self.samples = Counter(ask.prompt for ask in asks)
        self.left = self.samples.copy()  # not ended
        self.prompts: list[int] = []  # in the cache, by row

    def run(self, answers: list[list[Completion | None]], ended: Callable[[Ask], None]) -> None:
        while True:
            self._begin()
            if self.busy == 0:
                return
            places = np.arange(self.busy)
            logits = self.fused.step(torch.from_numpy(self.last[places]), self.positions[places])
            chosen, done = self.board.write(places, logits)
            self.last[places] = chosen.cpu().numpy()
            self.positions[places] += 1
            gone = done.nonzero()[0].tolist()
            asks = [self.board.take(place, answers) for place in gone]
            for place, ask in reversed(list(zip(gone, asks, strict=True))):  # who moves stood behind the gap
                self._close(place, ask.prompt)
            for ask in asks:
                ended(ask)

    def _begin(self) -> None:
        """Begin the next answers in the free places."""
        texts: list[np.ndarray] = []  # to be read
        targets: list[tuple[Store, int]] = []
        while self.queue and self.busy < self.places:
            ask, place = self.queue.popleft(), self.busy
            text = ask.prompt_ids[:-1]
            self.board.enter(place, ask)
            self.positions[place], self.last[place] = len(text), ask.prompt_ids[-1]
            self.busy += 1
            if len(text) == 0 or self.samples[ask.prompt] == 1:
                target = self.cache.own, self.cache.begin(ALONE, len(text))
            elif ask.prompt in self.prompts:
                self.cache.begin(self.prompts.index(ask.prompt))
                continue
            else:
                self.prompts.append(ask.prompt)
                target = self.cache.prompts, self.cache.prompts.append(len(text))
                self.cache.begin(target[1])
            if len(text):
                texts.append(text)
                targets.append(target)
        begin, tokens = 0, 0
        for i, text in enumerate(texts):
            tokens += len(text)
            if i + 1 == len(texts) or tokens + len(texts[i + 1]) > READ_TOKENS:
                self.fused.read(texts[begin : i + 1], targets[begin : i + 1])
                begin, tokens = i + 1, 0

    def _close(self, place: int, prompt: int) -> None:
        """Free an answer's place, and its prompt's with the last of its samples."""
        for source, target in self.cache.close(place):
            self.board.move(source, target)
            self.positions[target], self.last[target] = self.positions[source], self.last[source]
        self.busy -= 1
        self.left[prompt] -= 1
        if self.left[prompt] == 0 and prompt in self.prompts:
            for source, target in self.cache.close_prompt(self.prompts.index(prompt)):
                self.prompts[target] = self.prompts[source]
            self.prompts.pop()
