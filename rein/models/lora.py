"""LoRA on a loaded model, and the fused weights of a live one.

Adapters are injected in place (peft). Fusing computes W + scale B A in the base weight's precision or
float32, whichever is wider, on a copy: the live model is untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rein.models.precision import own_weights

ADAPTER = "default"


def make_trainable(
    model: Any,
    *,
    lora_rank: int,  # 0: all weights are trained
    lora_alpha: float,
    target_modules: str | list[str],
    enable_gradient_checkpointing: bool,
    seed: int,
) -> None:
    """What every trained model is given once it is loaded: adapters, with its scalar head; checkpointing."""
    if lora_rank:
        add_lora(model, rank=lora_rank, alpha=lora_alpha, target_modules=target_modules, seed=seed)
        if hasattr(model, "score"):
            model.score.requires_grad_(True)
    if enable_gradient_checkpointing:
        # Inputs carry a gradient, without which adapters on a frozen trunk would get none.
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, target_modules: str | list[str], seed: int
) -> None:
    """Freeze `model` and put trainable adapters on its linear layers; at first they change no output."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = _linear_layers(model) if target_modules == "all-linear" else target_modules
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)


def _linear_layers(model: nn.Module) -> list[str]:
    """Last names of the linear layers of the blocks: every one but the heads."""
    heads = {"lm_head", "score"}
    names = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return sorted(names - heads)


def has_lora(model: nn.Module) -> bool:
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the frozen start policy; adapters come back even on error."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def beneath(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers under the adapters, themselves, by the names of the model without adapters."""
    own = [model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)]
    named = itertools.chain(*own)
    return {name.replace(".base_layer.", "."): tensor for name, tensor in named if ".lora_" not in name}


@torch.no_grad()
def fused_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model with its adapters fused in, under the names of the model without them."""
    with own_weights(model):
        return _fused(model)


def _fused(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = dict(model.state_dict())
    fused: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" not in name:
            fused[name.replace(".base_layer.", ".")] = tensor
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer().weight
            delta = module.get_delta_weight(ADAPTER)
            fused[f"{name}.weight"] = (base.to(delta.dtype) + delta).to(base.dtype)
    return fused
