"""A model's rows for its tokenizer's ids: more where some id has none, never fewer."""

from __future__ import annotations

from typing import Any

import torch

from rein.protocols import Tokenizer


def highest_id(tokenizer: Tokenizer) -> int:
    """-1 where there is no id."""
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(known.values(), default=-1)


@torch.no_grad()
def grow_to(model: Any, tokenizer: Tokenizer) -> None:
    """Give each id of the tokenizer a row; new rows are the mean of the old, the same in every model."""
    have, need = model.get_input_embeddings().num_embeddings, highest_id(tokenizer) + 1
    if need <= have:
        return
    with torch.random.fork_rng(devices=[]):  # what it draws is overwritten
        model.resize_token_embeddings(need, mean_resizing=False)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        if end is not None and end.weight.shape[0] == need:
            for tensor in (end.weight, getattr(end, "bias", None)):
                if tensor is not None:
                    tensor[have:] = tensor[:have].mean(0)
