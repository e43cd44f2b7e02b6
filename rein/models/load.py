"""Hugging Face folders to modules: tokenizer, weights, stop ids, adapters. save.py is the way back.

Folders are checked before transformers is asked, so that a wrong path is never taken for a name on a hub. A
model is loaded whole onto its place.
Dropout is off in every model: ratios of PPO must start at 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from rein.errors import CheckpointError, ConfigError, ReinError
from rein.model_files import TOKENIZER_FILES, read_json, stop_ids_of
from rein.models import attention
from rein.models.adapters import CONFIG as ADAPTER_CONFIG
from rein.models.adapters import attached, base_named, fused
from rein.models.forwards import use_own_forwards
from rein.models.liger import use_liger
from rein.models.place import CPU, Place
from rein.models.precision import quickest_float32
from rein.protocols import Tokenizer

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def model_folder(path: str, where: str) -> str:
    """The local folder of `path`: a folder, or a hub name (`org/name`) whose files come to the local cache.

    Raises ConfigError for a path that does not exist, before anything is loaded.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "adapter_config.json").exists():
            raise ConfigError(f"{where}: {path} has no config.json; give a Hugging Face model folder")
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1 or folder.parent.is_dir():
        raise ConfigError(
            f"{where}: path {path} does not exist; give a model folder, or run the stage that makes it"
        )
    try:
        return str(snapshot_download(path, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: {path} is no folder, and a hub gives no model of that name ({first_line(error)}); "
            "give a model folder"
        ) from error


def load_tokenizer(path: str, *, trust_remote_code: bool = False, where: str = "model.path") -> Tokenizer:
    """The tokenizer of a model folder; PAD falls back to EOS (masks come from lengths, never from ids)."""
    folder = model_folder(path, where)
    if (Path(folder) / ADAPTER_CONFIG).exists() and not _holds_tokenizer(folder):
        folder = model_folder(base_named(Path(folder)), where)
    # transformers makes an empty tokenizer where it finds no file of one.
    if not _holds_tokenizer(folder):
        raise CheckpointError(
            f"{where}: {path} holds no tokenizer; save the model's tokenizer into that folder"
        )
    # For some kinds of model AutoTokenizer makes another tokenizer of the file than the one that wrote it.
    kind = PreTrainedTokenizerFast if _is_its_file(Path(folder)) else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ReinError, MemoryError):
        raise
    except Exception as error:  # the library raises bare Exception for a broken file
        raise CheckpointError(
            f"{where}: {path} has a tokenizer that cannot be loaded ({first_line(error)}); check that folder"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    for how_loaded in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(how_loaded, None)  # would be saved with it
    result: Tokenizer = tokenizer
    return result


def _holds_tokenizer(folder: str) -> bool:
    return any(part in file.name for file in Path(folder).iterdir() for part in TOKENIZER_FILES)


def _is_its_file(folder: Path) -> bool:
    """Whether the folder says that tokenizer.json is the whole tokenizer, of no class of its own."""
    config = read_json(folder / "tokenizer_config.json")
    return (folder / "tokenizer.json").exists() and config.get("tokenizer_class") == "TokenizersBackend"


def stop_ids(path: str, tokenizer: Tokenizer) -> list[int]:
    """Ids that end a response: the generation config's, the model config's and the tokenizer's."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return sorted({*stop_ids_of(_plain_folder(path)), *own})


def vocabulary_of(path: str) -> int | None:
    """The ids that a folder's model knows; None where its configuration does not say."""
    found = read_json(_plain_folder(path) / "config.json").get("vocab_size")
    return found if isinstance(found, int) else None


def _plain_folder(path: str) -> Path:
    """The folder with a model's own configuration: that of its base where `path` is one of adapters."""
    folder = Path(path)
    if (folder / ADAPTER_CONFIG).exists():
        return Path(model_folder(base_named(folder), "model.path"))
    return Path(model_folder(path, "model.path"))


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _load(
    auto: Any, path: str, where: str, place: Place, *, new: Collection[str] = (), **options: Any
) -> Any:
    """The model of a folder, whole: weights that the folder lacks are an error, but for those in `new`."""
    attention.register()
    quickest_float32(place.device)
    folder = model_folder(path, where)
    base, adapters = folder, None
    if (Path(folder) / ADAPTER_CONFIG).exists():
        adapters = Path(folder)
        base = model_folder(base_named(adapters), where)
    read_json(Path(base) / "generation_config.json")  # is saved with what is trained: told before, not after
    try:
        model, info = auto.from_pretrained(
            base, attn_implementation=attention.NAMES[place.attention], output_loading_info=True, **options
        )
        if lacking := sorted(set(info["missing_keys"]) - set(new)):
            raise ValueError(f"{len(lacking)} weights are missing, first {lacking[0]}")
        if adapters is not None:  # fused now, so that "adapter off" later means this start policy
            model = fused(attached(model, adapters))
    except ReinError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{where}: {path} cannot be loaded ({first_line(error)}); check that the folder is whole"
        ) from error
    return made_ready(model.to(place.device), place)


def made_ready(model: Any, place: Place) -> Any:
    """In train mode, without dropout and cache, its steps fused."""
    for name, value in model.config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.config.use_cache = False
    if place.liger:
        use_liger(model)
    else:
        use_own_forwards(model)
    return model.train()


def load_causal_lm(
    path: str, *, dtype: str, place: Place = CPU, trust_remote_code: bool = False, where: str = "model.path"
) -> Any:
    """A causal LM with packed attention, in train mode without dropout.

    Raises ConfigError for a path that does not exist, CheckpointError for a folder that cannot be read.
    """
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    return _load(AutoModelForCausalLM, path, where, place, **options)


def load_scalar_model(
    path: str, *, dtype: str, place: Place = CPU, trust_remote_code: bool = False, where: str = "model.path"
) -> Any:
    """A trunk with a one-number head (`score`): reward models and critics; a new head starts at zero."""
    folder = model_folder(path, where)
    has_head = _has_score_head(folder)
    of_base = has_head and (Path(folder) / "config.json").exists()  # else an adapter's, on a base without
    model = _load(
        AutoModelForSequenceClassification,
        folder,
        where,
        place,
        new=() if of_base else ("score.weight", "score.bias"),
        dtype=DTYPES[dtype],
        trust_remote_code=trust_remote_code,
        num_labels=1,
    )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise CheckpointError(
            f"{where}: {path} has no one-number `score` head; this architecture cannot be a critic yet"
        )
    if not has_head:
        nn.init.zeros_(head.weight)
        if head.bias is not None:
            nn.init.zeros_(head.bias)
    return model


def _has_score_head(path: str) -> bool:
    """Whether the folder's own weights hold the head, rather than one transformers made up."""
    adapter = Path(path) / "adapter_config.json"
    if adapter.exists():
        return bool(read_json(adapter).get("task_type") == "SEQ_CLS")
    return "SequenceClassification" in str(read_json(Path(path) / "config.json").get("architectures"))


def trunk_of(model: Any) -> Any:
    """The decoder below the head."""
    return getattr(model, model.base_model_prefix)


def head_function(model: Any, layer: nn.Module | None = None) -> Callable[[Tensor], Tensor]:
    """Last hidden states [R, H] -> logits [R, V], with the architecture's own scaling and cap.

    `layer` takes the place of the model's output layer.
    """
    head, config = model.get_output_embeddings() if layer is None else layer, model.config
    cap = getattr(config, "final_logit_softcapping", None)
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = head(hidden)
        if divisor:
            out = out / divisor
        if factor:
            out = out * factor
        return torch.tanh(out / cap) * cap if cap else out

    return logits
