"""Answers being written, one a place: what is asked, the numbers that draw its tokens, and what ends it.

Knows no model; both ways of decoding write here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rein.engines.sampling import choose, uniforms
from rein.errors import EngineError
from rein.protocols import Tokenizer
from rein.types import Completion, Prompt

STOP_TEXT_WINDOW = 16  # tokens decoded to look for a stop text


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to write."""

    prompt: int  # its index in the call
    sample: int
    prompt_ids: np.ndarray
    room: int  # its longest length, in tokens
    place: int | None = None  # of the prompt among all, which decides what is drawn; default: `prompt`


@dataclass(frozen=True, slots=True)
class Manner:
    """How tokens are drawn and what ends an answer."""

    temperature: float  # 0: greedy
    top_p: float
    seed: int
    stop_ids: np.ndarray
    stop_texts: tuple[str, ...]
    tokenizer: Tokenizer


def room_of(prompt: Prompt, max_new_tokens: int, context: int) -> int:
    """How long an answer may get; the prompts beside it play no part.

    Raises EngineError when a prompt leaves no room in the model's context.
    """
    room = min(max_new_tokens, context - len(prompt.prompt_ids))
    if room < 1:
        raise EngineError(
            f"{prompt.where}: prompt of {len(prompt.prompt_ids)} tokens fills the model's context "
            f"of {context}; set data.max_prompt_length lower"
        )
    return room


class Board:
    """`places` answers of at most `room` tokens; a place is used again once its answer is taken."""

    def __init__(self, manner: Manner, places: int, room: int) -> None:
        self.manner = manner
        self.asks: list[Ask | None] = [None] * places
        self.ids = np.zeros((places, room), dtype=np.int64)
        self.log_probs = np.zeros((places, room), dtype=np.float32)
        self.draws = np.zeros((places, room))
        self.rooms = np.zeros(places, dtype=np.int64)
        self.written = np.zeros(places, dtype=np.int64)
        self.stopped = np.zeros(places, dtype=np.bool_)

    def enter(self, place: int, ask: Ask) -> None:
        self.asks[place] = ask
        self.rooms[place], self.written[place], self.stopped[place] = ask.room, 0, False
        if self.manner.temperature > 0:
            among = ask.prompt if ask.place is None else ask.place
            self.draws[place, : ask.room] = uniforms(self.manner.seed, among, ask.sample, ask.room)

    def write(self, places: np.ndarray, logits: Tensor) -> tuple[Tensor, np.ndarray]:
        """Choose a token for each of `places`: ids, on the logits' device, and which answers end there."""
        manner, steps = self.manner, self.written[places]
        draws = torch.from_numpy(self.draws[places, steps]).to(logits.device)
        chosen, log_probs = choose(logits, temperature=manner.temperature, top_p=manner.top_p, draws=draws)
        ids = chosen.cpu().numpy()
        self.ids[places, steps] = ids
        self.log_probs[places, steps] = log_probs.float().cpu().numpy()
        self.written[places] = steps + 1
        self.stopped[places] = np.isin(ids, manner.stop_ids) | self._stop_texts(places)
        return chosen, self.stopped[places] | (self.written[places] >= self.rooms[places])

    def _stop_texts(self, places: np.ndarray) -> np.ndarray:
        found = np.zeros(len(places), dtype=np.bool_)
        if self.manner.stop_texts:
            for i, place in enumerate(places.tolist()):
                end = self.written[place]
                tail = self.ids[place, max(end - STOP_TEXT_WINDOW, 0) : end].tolist()
                text = self.manner.tokenizer.decode(tail)
                found[i] = any(stop in text for stop in self.manner.stop_texts)
        return found

    def move(self, source: int, target: int) -> None:
        """Go on with an answer at another place."""
        self.asks[target] = self.asks[source]
        for column in (self.ids, self.log_probs, self.draws, self.rooms, self.written, self.stopped):
            column[target] = column[source]

    def take(self, place: int, answers: Sequence[list[Completion | None]]) -> Ask:
        """Put the answer written at `place` where it was asked for."""
        ask = self.asks[place]
        assert ask is not None
        length = int(self.written[place])
        answers[ask.prompt][ask.sample] = Completion(
            response_ids=self.ids[place, :length].copy(),
            log_probs=self.log_probs[place, :length].copy(),
            finish_reason="stop" if self.stopped[place] else "length",
        )
        return ask
