"""Modules to Hugging Face folders: whole weights, adapters fused in, tied matrices still tied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from rein.drafts import draft_of, replace_folder
from rein.errors import CheckpointError, GuardStop
from rein.model_files import open_weights, read_json, write_object
from rein.models.adapters import keep, own_adapters
from rein.models.load import first_line
from rein.models.lora import fused_state_dict, has_lora
from rein.protocols import Tokenizer
from rein.sharded import whole

TORCH_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")
}  # that a folder may have


def save_folder(
    model: Any,
    tokenizer: Tokenizer,
    target: Path,
    *,
    start: str,  # where the model was loaded from: its generation config is kept
) -> None:
    """A plain Hugging Face folder, adapters fused in; complete or absent (written beside, then renamed)."""
    draft = draft_of(target)
    state = {name: whole(tensor).cpu() for name, tensor in state_of(model).items()}
    adapters = {name: whole(tensor).cpu() for name, tensor in own_adapters(model).items()}
    refuse_not_finite(state, target)
    tied_before = getattr(model.config, "tie_word_embeddings", False)
    tied = tied_before and not _head_grew_apart(model, state)
    if tied:
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    # A name no loader knows would make the folder unreadable without this package.
    implementation = model.config._attn_implementation
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        model.config._attn_implementation = "sdpa"
        model.config.tie_word_embeddings = tied
        model.config.use_cache = True
        model.save_pretrained(draft, state_dict=state)
        open_weights(draft)
        tokenizer.save_pretrained(str(draft))
        keep(model, adapters, draft, start=start)
        generation = Path(start) / "generation_config.json"
        if generation.exists():
            GenerationConfig.from_pretrained(start).save_pretrained(draft)
        replace_folder(draft, target)
    except Exception as error:  # safetensors and tokenizers report a full disk each in its own way
        raise CheckpointError(
            f"{target}: cannot be saved ({first_line(error)}); free space or choose another folder"
        ) from error
    finally:
        model.config._attn_implementation = implementation
        model.config.tie_word_embeddings = tied_before
        model.config.use_cache = False
        shutil.rmtree(draft, ignore_errors=True)


def state_of(model: Any) -> dict[str, Tensor]:
    """The state dict with adapters fused in."""
    return fused_state_dict(model) if has_lora(model) else dict(model.state_dict())


def give_whole(model: Any) -> None:
    """On another rank than the one that saves: give it this one's parts, and keep nothing."""
    for tensor in (*state_of(model).values(), *own_adapters(model).values()):
        whole(tensor)


def cast_folder(folder: Path, dtype: torch.dtype) -> None:
    """Round the weights of a written folder to another precision, a file at a time."""
    size = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(file).items()
        }
        size += sum(tensor.nbytes for tensor in tensors.values())
        try:
            save_file(tensors, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:  # how safetensors reports a full disk
            raise CheckpointError(
                f"{file}: cannot be written ({first_line(error)}); free space or choose another folder"
            ) from error
    open_weights(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        body = read_json(index)
        write_object(index, body | {"metadata": {**body.get("metadata", {}), "total_size": size}})
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)
    write_object(folder / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})


def refuse_not_finite(state: dict[str, Tensor], target: Path) -> None:
    """Raise GuardStop where a weight is nan or infinite: such a model is never a result."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise GuardStop(
                f"{target}: {name} is not finite, so the model is not written; lower the learning rate and "
                "train again"
            )


def _head_grew_apart(model: Any, state: dict[str, Tensor]) -> bool:
    """Whether an adapter on one end only has made two matrices of a tied model's one."""
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    one, other = state[f"{name}.weight"], state.get("lm_head.weight")
    return other is not None and one.data_ptr() != other.data_ptr() and not torch.equal(one, other)
