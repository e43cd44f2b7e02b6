"""Batched decoding with a Hugging Face causal LM in this process.

Prompts are sorted by length and left-padded; each is read once and its cache shared by its n answers; rows
that end leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rein.engines.sampling import choose
from rein.errors import EngineError
from rein.protocols import Tokenizer
from rein.types import Completion, Prompt

STOP_TEXT_WINDOW = 16  # tokens decoded to look for a stop text


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
        batch_size: int = 128,
        stop_texts: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long)
        self.batch_size = batch_size
        self.stop_texts = tuple(stop_texts)

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
    ) -> list[list[Completion]]:
        """n completions for each prompt, in the prompts' order; the same seed gives the same answers.

        Raises EngineError when a prompt leaves no room in the model's context.
        """
        answers: list[list[Completion]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].prompt_ids), i))
        size = max(self.batch_size // n, 1)
        training = self.model.training
        self.model.eval()  # gradient checkpointing in train mode would drop the cache
        try:
            for begin in range(0, len(order), size):
                batch = order[begin : begin + size]
                generator = torch.Generator().manual_seed((seed + begin * 0x9E3779B97F4A7C15) % 2**63)
                rooms = [self._room(prompts[i], max_new_tokens) for i in batch]
                decode = _Decode(
                    self, [prompts[i].prompt_ids for i in batch], n, rooms, temperature, top_p, generator
                )
                for k, completion in enumerate(decode.run()):
                    answers[batch[k // n]].append(completion)
                if advance is not None:
                    advance(len(batch))
        finally:
            self.model.train(training)
        return answers

    def _room(self, prompt: Prompt, max_new_tokens: int) -> int:
        """How long an answer may get; the prompts beside it play no part."""
        context = getattr(self.model.config, "max_position_embeddings", None) or 2**31
        room = min(max_new_tokens, context - len(prompt.prompt_ids))
        if room < 1:
            raise EngineError(
                f"{prompt.where}: prompt of {len(prompt.prompt_ids)} tokens fills the model's context "
                f"of {context}; set data.max_prompt_length lower"
            )
        return room


class _Decode:
    """One batch: `rows` answers being written; finished rows are taken out of the cache."""

    def __init__(
        self,
        engine: HfEngine,
        prompts: list[np.ndarray],
        n: int,
        rooms: list[int],
        temperature: float,
        top_p: float,
        generator: torch.Generator,
    ) -> None:
        self.engine, self.n = engine, n
        self.temperature, self.top_p, self.generator = temperature, top_p, generator
        width = max(len(p) for p in prompts)
        self.prompt_ids = torch.full(
            (len(prompts), width), engine.tokenizer.pad_token_id or 0, dtype=torch.long
        )
        self.mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            self.prompt_ids[i, width - len(prompt) :] = torch.tensor(prompt)
            self.mask[i, width - len(prompt) :] = 1
        rows = len(prompts) * n
        self.ids = torch.zeros(rows, max(rooms), dtype=torch.long)
        self.log_probs = torch.zeros(rows, max(rooms))
        self.lengths = torch.tensor(rooms).repeat_interleave(n)
        self.stopped = torch.zeros(rows, dtype=torch.bool)

    def run(self) -> list[Completion]:
        cache = DynamicCache(config=self.engine.model.config)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(self.prompt_ids, positions, cache).repeat_interleave(self.n, 0)
        cache.batch_repeat_interleave(self.n)
        self.mask = self.mask.repeat_interleave(self.n, 0)
        alive = torch.arange(len(self.ids))
        for step in range(self.ids.shape[1]):
            chosen, log_probs = choose(
                logits, temperature=self.temperature, top_p=self.top_p, generator=self.generator
            )
            self.ids[alive, step] = chosen
            self.log_probs[alive, step] = log_probs.float()
            ended = torch.isin(chosen, self.engine.stop_ids) | self._stop_text(alive, step)
            self.lengths[alive[ended]] = step + 1
            self.stopped[alive[ended]] = True
            ended = step + 1 >= self.lengths[alive]  # now also the rows that are full
            if bool(ended.all()):
                break
            if bool(ended.any()):
                keep = (~ended).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                alive, chosen, self.mask = alive[keep], chosen[keep], self.mask[keep]
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(alive), 1)], 1)
            logits = self._forward(chosen.unsqueeze(1), self.mask.sum(1, keepdim=True) - 1, cache)
        return [self._completion(row) for row in range(len(self.ids))]

    def _forward(self, ids: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        model = self.engine.model
        device = next(model.parameters()).device
        out = model(
            input_ids=ids.to(device),
            attention_mask=self.mask.to(device),
            position_ids=positions.to(device),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = out.logits[:, -1].cpu()
        return logits

    def _stop_text(self, alive: Tensor, step: int) -> Tensor:
        ended = torch.zeros(len(alive), dtype=torch.bool)
        if self.engine.stop_texts:
            begin = max(step + 1 - STOP_TEXT_WINDOW, 0)
            for i, row in enumerate(alive.tolist()):
                tail = self.engine.tokenizer.decode(self.ids[row, begin : step + 1].tolist())
                ended[i] = any(text in tail for text in self.engine.stop_texts)
        return ended

    def _completion(self, row: int) -> Completion:
        length = int(self.lengths[row])
        return Completion(
            response_ids=self.ids[row, :length].numpy().copy(),
            log_probs=self.log_probs[row, :length].numpy().copy(),
            finish_reason="stop" if self.stopped[row] else "length",
        )
