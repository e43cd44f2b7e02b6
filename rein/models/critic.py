"""The value function over packed rows: V(s_t) at the state before each response token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rein.models.compiled import compile_blocks
from rein.models.load import load_scalar_model, load_tokenizer, model_folder, save_folder, trunk_of
from rein.models.lora import make_trainable
from rein.models.precision import make_fast
from rein.models.trunk import run_trunk, shares_prompts
from rein.protocols import Tokenizer
from rein.types import TokenRow


class Critic:
    """A trunk with a one-number head. Temperature plays no part."""

    def __init__(self, model: Any, tokenizer: Tokenizer, path: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.path = path
        self.device = next(model.parameters()).device
        self.shares_prompts = shares_prompts(model)

    def values(self, rows: Sequence[TokenRow]) -> Tensor:
        """V before each response token, [B, T], fp32; 0 past a row's end."""
        packed, states = run_trunk(self.model, rows, share=self.shares_prompts)
        hidden = states.index_select(0, packed.states)
        values: Tensor = self.model.score(hidden).squeeze(-1)
        return packed.spread(values if values.dtype == torch.float64 else values.float())

    def save(self, path: Path) -> None:
        save_folder(self.model, self.tokenizer, path, start=self.path)


def load_critic(
    path: str,
    *,
    dtype: str = "float32",
    precision: str = "exact",
    lora_rank: int = 0,
    lora_alpha: float = 16,
    target_modules: str | list[str] = "all-linear",
    enable_gradient_checkpointing: bool = False,
    use_torch_compile: bool = False,
    trust_remote_code: bool = False,
    seed: int = 0,
    where: str = "critic.model.path",
) -> Critic:
    """A critic from an LM folder (new head, at zero) or a reward model or critic folder (its head kept)."""
    path = model_folder(path, where)
    model = load_scalar_model(path, dtype=dtype, trust_remote_code=trust_remote_code, where=where)
    make_trainable(
        model,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        seed=seed,
    )
    if precision == "fast":
        make_fast(model, trunk_of(model), [model.score])
    if use_torch_compile:
        compile_blocks(model)
    return Critic(model, load_tokenizer(path, trust_remote_code=trust_remote_code, where=where), path)
