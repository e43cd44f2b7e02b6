"""Decoding with any causal LM, through transformers' own forward and cache.

Prompts of one batch are left-padded; each is read once and its cache repeated for its n answers; rows that
end leave the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rein.engines.board import Ask, Board, Manner
from rein.types import Completion


def decode(
    model: Any,
    asks: list[Ask],  # the n of a prompt beside each other
    n: int,
    manner: Manner,
    answers: list[list[Completion | None]],  # [prompts][n], filled
) -> None:
    """Write one batch of answers."""
    board = Board(manner, len(asks), max(ask.room for ask in asks))
    for place, ask in enumerate(asks):
        board.enter(place, ask)
    ids, mask = _left_padded([ask.prompt_ids for ask in asks[::n]], manner.tokenizer.pad_token_id or 0)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = _forward(model, ids, mask, positions, cache).repeat_interleave(n, 0)
    cache.batch_repeat_interleave(n)
    mask = mask.repeat_interleave(n, 0)
    alive = np.arange(len(asks))
    while True:
        chosen, ended = board.write(alive, logits)
        for place in alive[ended].tolist():
            board.take(place, answers)
        if ended.all():
            return
        if ended.any():
            keep = torch.from_numpy((~ended).nonzero()[0])
            cache.batch_select_indices(keep)
            alive, chosen, mask = alive[~ended], chosen[keep], mask[keep]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
        logits = _forward(model, chosen.unsqueeze(1), mask, mask.sum(1, keepdim=True) - 1, cache)


def _left_padded(prompts: list[np.ndarray], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask, [B, T]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    return ids, mask


def _forward(model: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    device = next(model.parameters()).device
    out = model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = out.logits[:, -1].cpu()
    return logits
