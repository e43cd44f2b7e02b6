"""Batched decoding with a Hugging Face causal LM in this process.

Models shaped like Llama decode in slots that never idle (slots.py), any other through transformers
(padded.py); prompts are sorted by length and each is read once for its n answers. What an answer is depends
on the seed and its place among the prompts, not on what is decoded beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rein.engines import padded, slots
from rein.engines.board import Ask, Manner, room_of
from rein.engines.fused import readable
from rein.protocols import Tokenizer
from rein.types import Completion, Prompt


class HfEngine:
    """Implements protocols.RolloutEngine.

    `stop_ids` end a response and belong to it; so does the token that completes a stop text.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        *,
        batch_size: int = 128,  # answers decoded together
        stop_texts: Sequence[str] = (),
        fused: bool = True,  # False: always through transformers
        before: Callable[[], None] | None = None,  # called first: weights may have moved
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
        self.batch_size = batch_size
        self.stop_texts = tuple(stop_texts)
        self.fused = fused
        self.before = before

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Callable[[int], None] | None = None,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """n completions for each prompt, in the prompts' order; the same seed gives the same answers.

        `places`: of the prompts among all, where these are some of them. Raises EngineError when a prompt
        leaves no room in the model's context.
        """
        if self.before is not None:
            self.before()
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].prompt_ids), i))
        context = getattr(self.model.config, "max_position_embeddings", None) or 2**31
        asks = []
        for i in order:
            room = room_of(prompts[i], max_new_tokens, context)
            place = i if places is None else places[i]
            asks += [Ask(i, sample, prompts[i].prompt_ids, room, place) for sample in range(n)]
        manner = Manner(temperature, top_p, seed, self.stop_ids, self.stop_texts, self.tokenizer)
        answers: list[list[Completion | None]] = [[None] * n for _ in prompts]
        training = self.model.training
        self.model.eval()  # gradient checkpointing in train mode would drop the cache
        try:
            self.decode(asks, n, manner, answers, advance)
        finally:
            self.model.train(training)
        return [[completion for completion in some if completion is not None] for some in answers]

    def decode(
        self,
        asks: list[Ask],  # the n of a prompt beside each other
        n: int,
        manner: Manner,
        answers: list[list[Completion | None]],
        advance: Callable[[int], None] | None = None,
    ) -> None:
        """Fill `answers[prompt][sample]` by the way that suits the model."""
        tell = advance or (lambda _: None)
        if self.fused and asks and readable(self.model):
            done: Counter[int] = Counter()

            def ended(ask: Ask) -> None:
                done[ask.prompt] += 1
                if done[ask.prompt] == n:
                    tell(1)

            slots.decode(self.model, asks, self.batch_size, manner, answers, ended)
            return
        size = max(self.batch_size // n, 1) * n
        for begin in range(0, len(asks), size):
            batch = asks[begin : begin + size]
            padded.decode(self.model, batch, n, manner, answers)
            tell(len(batch) // n)
