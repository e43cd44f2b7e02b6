"""Adapters as peft writes them: kept beside the weights that they were fused into, read back, fused.

A folder of adapters names its base. What is read here is a fused start policy, or, for a check, base and
adapters as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rein.errors import CheckpointError
from rein.model_files import read_json
from rein.models.lora import ADAPTER, has_lora

KEPT = "adapter"  # inside a folder of fused weights
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapters_in(folder: Path) -> Path | None:
    """Where the adapters of a model folder lie: it is one of adapters, or keeps those fused into it."""
    return next((place for place in (folder, folder / KEPT) if (place / CONFIG).exists()), None)


def base_named(adapters: Path) -> str:
    """The base that a folder of adapters names. Raises CheckpointError where it names none."""
    named = read_json(adapters / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise CheckpointError(
            f"{adapters / CONFIG}: base_model_name_or_path is {named!r}; name the base model"
        )
    return named


def own_adapters(model: Any) -> dict[str, Tensor]:
    """The adapters of a policy in training, under peft's names; empty for any other model."""
    if not has_lora(model) or hasattr(model, "score"):
        return {}
    state: dict[str, Tensor] = model.state_dict()
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}', '')}": tensor
        for name, tensor in state.items()
        if ".lora_" in name
    }


def keep(model: Any, tensors: dict[str, Tensor], folder: Path, *, start: str) -> None:
    """Write a policy's adapters into `folder`/adapter where `start`, which they are on, can be their base."""
    base = Path(start).absolute()
    rows = read_json(base / "config.json").get("vocab_size")
    if not tensors or rows != model.config.vocab_size:  # adapters on adapters, or on rows that no file has
        return
    config = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.task_type, config.inference_mode = str(base), "CAUSAL_LM", True
    (folder / KEPT).mkdir()
    config.save_pretrained(str(folder / KEPT))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / KEPT / WEIGHTS)


def attached(base: Any, adapters: Path) -> Any:
    """The base with a folder's adapters on it, not fused; it grows where they bring rows of their own."""
    embeddings = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embeddings)
    rows = max((shape[0] for key, shape in _shapes(adapters) if f".{name}." in key), default=0)
    if rows > embeddings.num_embeddings:
        base.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ties, which fused() sees to, and of names transformers has left
        model = PeftModel.from_pretrained(base, adapters)
        found = model.load_adapter(adapters, ADAPTER)  # again, for what peft only warns of
    lost = [*found.missing_keys, *(key for key in found.unexpected_keys if _has_place(base, key))]
    if lost:
        raise CheckpointError(
            f"{adapters}: {len(lost)} adapters do not fit {CONFIG} and the base, first {lost[0]}; save the "
            "adapters anew, with peft's names, or name the base that they are of"
        )
    return model


def _has_place(base: Any, key: str) -> bool:
    """Whether an adapter should be on this model: that of the head of another kind of model need not."""
    head = next((head for head in ("lm_head", "score") if f".{head}." in key), None)
    return ".lora_" in key and (head is None or hasattr(base, head))


def _shapes(adapters: Path) -> Iterator[tuple[str, list[int]]]:
    """Of what the folder holds whole, not as adapters; nothing of what is no safetensors file."""
    if (adapters / WEIGHTS).exists():
        with safe_open(adapters / WEIGHTS, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key.endswith("weight") and ".lora_" not in key:
                    yield key, file.get_slice(key).get_shape()


@torch.no_grad()
def fused(adapted: Any) -> Any:
    """The base with its adapters in its weights; ends that were one matrix part where only one is adapted.

    Fused in the weights' own precision: load them in float32 or wider.
    """
    model = adapted.get_base_model()
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for end in _ends(model):
        if tied and isinstance(end, BaseTunerLayer):  # else the other end would be changed with it
            layer = end.get_base_layer()
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    model = adapted.merge_and_unload()
    ends = [end.weight for end in _ends(model)]
    model.config.tie_word_embeddings = tied and all(torch.equal(ends[0], end) for end in ends[1:])
    return model


def _ends(model: Any) -> list[Any]:
    return [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
