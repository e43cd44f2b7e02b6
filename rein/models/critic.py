"""The value function over packed rows: V(s_t) at the state before each response token.

A model of its own, or adapters and a head on the frozen weights of an actor.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from rein.errors import CheckpointError, ConfigError
from rein.models.actor import Actor
from rein.models.load import (
    load_scalar_model,
    load_tokenizer,
    made_ready,
    model_folder,
    trunk_of,
)
from rein.models.lora import beneath, has_lora, make_trainable
from rein.models.place import CPU, Place
from rein.models.precision import is_fast, set_precision
from rein.models.save import save_folder
from rein.models.trunk import Whole, run_trunk, shares_prompts
from rein.models.ulysses import Slices
from rein.models.vocabulary import grow_to
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
        self.whole = Whole(model)
        self.slices: Slices | None = None  # the ranks that share a pack's positions

    def values(self, rows: Sequence[TokenRow]) -> Tensor:
        """V before each response token, [B, T], fp32; 0 past a row's end."""
        found: Tensor = self.whole(self._values, rows)
        return found

    def _values(self, rows: Sequence[TokenRow]) -> Tensor:
        packed, states = run_trunk(self, rows, slices=self.slices)
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
    place: Place = CPU,
    trust_remote_code: bool = False,
    seed: int = 0,
    where: str = "critic.model.path",
) -> Critic:
    """A critic from an LM folder (new head, at zero) or a reward model or critic folder (its head kept)."""
    path = model_folder(path, where)
    model = load_scalar_model(
        path, dtype=dtype, place=place, trust_remote_code=trust_remote_code, where=where
    )
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, where=where)
    grow_to(model, tokenizer)
    make_trainable(
        model,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        seed=seed,
    )
    set_precision(model, precision, trunk_of(model), [model.score])
    return Critic(model, tokenizer, path)


def critic_on(
    actor: Actor,
    *,
    lora_rank: int,
    lora_alpha: float = 16,
    target_modules: str | list[str] = "all-linear",
    enable_gradient_checkpointing: bool = False,
    place: Place = CPU,  # the actor's
    trust_remote_code: bool = False,
    seed: int = 0,
    where: str = "critic.model.share_trunk",
) -> Critic:
    """The critic that load_critic makes of the actor's folder, on the actor's own weights.

    Adapters and the head, at zero, are all that it adds. Its modules are its own too, with the actor's frozen
    tensors in them: no adapter is ever switched, whichever pass is made, or made again for a gradient.
    Raises ConfigError for an actor without adapters, CheckpointError for an architecture that is built
    otherwise.
    """
    model = made_ready(_scalar_model_on(actor, trust_remote_code=trust_remote_code, where=where), place)
    make_trainable(
        model,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        seed=seed,
    )
    precision = "fast" if is_fast(actor.model) else "exact"
    set_precision(model, precision, trunk_of(model), [model.score], shared=actor.model)
    return Critic(model, actor.tokenizer, actor.path)


def _scalar_model_on(actor: Actor, *, trust_remote_code: bool, where: str) -> Any:
    """A trunk with a one-number head, at zero, of the tensors that lie beneath the actor's adapters."""
    lm = actor.model
    if not has_lora(lm):
        raise ConfigError(f"{where}: the actor trains its trunk; write model.lora_rank=16, or false")
    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=trust_remote_code
            )
        trunk, head = trunk_of(model), model.score
        if type(trunk) is not type(trunk_of(lm)) or head.out_features != 1:
            raise ValueError(f"{type(model).__name__} is built otherwise")
        for name, tensor in beneath(trunk_of(lm)).items():
            module, _, own = name.rpartition(".")
            setattr(trunk.get_submodule(module), own, tensor)
        head.to_empty(device=actor.device)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        named = [*model.named_parameters(), *model.named_buffers()]
        if left := [name for name, tensor in named if tensor.is_meta]:
            raise ValueError(f"the actor has no {left[0]}")
    except (OSError, ValueError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{where}: a critic cannot stand on the trunk of a {config.model_type} model ({why}); write false"
        ) from error
    return model
