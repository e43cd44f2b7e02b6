"""A learned reward over packed rows: one fp32 number per prompt + response, read at its last token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rein.models.load import (
    load_scalar_model,
    load_tokenizer,
    model_folder,
    stop_ids,
    trunk_of,
)
from rein.models.lora import make_trainable
from rein.models.place import CPU, Place
from rein.models.precision import set_precision
from rein.models.save import save_folder
from rein.models.trunk import Whole, run_trunk, shares_prompts
from rein.models.vocabulary import grow_to
from rein.protocols import Tokenizer
from rein.types import TokenRow


class RewardModel:
    """A sequence-classification model with one label, as transformers reloads it."""

    def __init__(self, model: Any, tokenizer: Tokenizer, path: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.path = path
        self.device = next(model.parameters()).device
        self.shares_prompts = shares_prompts(model)
        self.whole = Whole(model)
        # transformers finds the last token by this id; without it a batch cannot be scored after reload.
        model.config.pad_token_id = tokenizer.pad_token_id

    def scores(self, rows: Sequence[TokenRow]) -> Tensor:
        """[B], on the CPU; the head runs in fp32 whatever the trunk's dtype, so near answers do not tie."""
        found: Tensor = self.whole(self._scores, rows)
        return found.squeeze(-1).cpu()

    def _scores(self, rows: Sequence[TokenRow]) -> Tensor:
        packed, states = run_trunk(self, rows)
        hidden = states.index_select(0, packed.last)
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        scores: Tensor = torch.nn.functional.linear(
            wide, self.model.score.weight.to(wide.dtype), self.model.score.bias
        )
        return scores

    def save(self, path: Path) -> None:
        save_folder(self.model, self.tokenizer, path, start=self.path)


def load_reward_model(
    path: str,
    *,
    dtype: str = "float32",
    precision: str = "exact",
    lora_rank: int = 0,
    lora_alpha: float = 16,
    target_modules: str | list[str] = "all-linear",
    enable_gradient_checkpointing: bool = False,
    place: Place = CPU,
    trust_remote_code: bool = False,
    seed: int = 0,
    where: str = "score.path",
) -> RewardModel:
    """A reward model from its folder, or a new head on an LM's trunk."""
    path = model_folder(path, where)
    model = load_scalar_model(
        path, dtype=dtype, place=place, trust_remote_code=trust_remote_code, where=where
    )
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, where=where)
    grow_to(model, tokenizer)
    _part_pad_from_ends(model, tokenizer, stop_ids(path, tokenizer))
    make_trainable(
        model,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        seed=seed,
    )
    set_precision(model, precision, trunk_of(model), [model.score])
    return RewardModel(model, tokenizer, path)


def _part_pad_from_ends(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Give the tokenizer a PAD that no answer ends in, if need be a new token.

    transformers scores the last token that is not PAD: were PAD an end, it would read the one before.
    """
    if tokenizer.pad_token_id not in ends:
        return
    specials = [tokenizer.unk_token_id, *tokenizer.all_special_ids, *sorted(tokenizer.added_tokens_decoder)]
    free = [i for i in specials if i is not None and i not in ends and i != tokenizer.bos_token_id]
    if free:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free[0])
        return
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
