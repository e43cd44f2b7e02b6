"""Which numbers a frozen model gives, by content: a folder in, facts that change when its answers can.

Equal facts, equal log-probs and scores, wherever the folder lies and however its configuration is laid out.
They are the key of what is computed once (data/cache.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from rein.errors import ConfigError
from rein.hashing import hash_all
from rein.model_files import TOKENIZER_FILES, read_json
from rein.models import attention
from rein.models.load import model_folder

# Of a configuration: where it came from, who wrote it, and how the model is generated with.
NO_EFFECT = {
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "revision", "is_local", "local_files_only"),
    *("transformers_version", "peft_version", "torch_dtype", "dtype", "use_cache", "inference_mode"),
}
_TEMPLATE = ("chat_template.jinja", "chat_template.json")


def model_key(
    path: str, *, dtype: str, device: str, where: str, precision: str = "exact", compiled: bool = False
) -> dict[str, str]:
    """Weights, configuration, tokenizer and template by hash, and the numeric path.

    An adapter's folder counts with its base. Raises ConfigError for a folder without safetensors.
    """
    folder = Path(model_folder(path, where))
    adapter = folder / "adapter_config.json"
    folders = [folder]
    if adapter.exists():
        folders.append(Path(model_folder(str(read_json(adapter).get("base_model_name_or_path")), where)))
    weights = [file for each in folders for file in sorted(each.glob("*.safetensors"))]
    if not weights:
        raise ConfigError(
            f"{where}: {path} has no .safetensors, so what it says cannot be kept; save it anew"
        )
    settings = [read_json(each / name) for each in folders for name in ("config.json", "adapter_config.json")]
    own_code = [file for each in folders for file in sorted(each.glob("*.py"))]
    return {
        "weights": _contents(weights),
        "configuration": _hash_json([_plain(each) for each in settings], _contents(own_code)),
        "tokenizer": _tokenizer(folder),
        "template": _template(folder),
        "numeric path": " ".join(
            [dtype, device, attention.NAME]
            + ([] if precision == "exact" else [precision])
            + (["compiled"] if compiled else [])
        ),
    }


def _tokenizer(folder: Path) -> str:
    """Vocabulary, rules and special tokens."""
    config = {
        k: v for k, v in _plain(read_json(folder / "tokenizer_config.json")).items() if k != "chat_template"
    }
    named = (f for f in sorted(folder.iterdir()) if any(part in f.name for part in TOKENIZER_FILES))
    other = ("tokenizer_config.json", *_TEMPLATE)
    return _hash_json(config, _contents(f for f in named if f.is_file() and f.name not in other))


def _template(folder: Path) -> str:
    stored = read_json(folder / "tokenizer_config.json").get("chat_template")
    return _hash_json(stored, _contents(f for name in _TEMPLATE if (f := folder / name).exists()))


def _plain(settings: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key not in NO_EFFECT}


def _hash_json(*values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _contents(files: Iterable[Path]) -> str:
    return hash_all((file.name, file) for file in files)
