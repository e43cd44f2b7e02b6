"""A Hugging Face model folder without transformers: settings, ids that end answers, modes, the hash of it."""

import json
import shutil
from pathlib import Path
from typing import Any

from rein.errors import CheckpointError
from rein.hashing import hash_all

EXPORT = "rein_export.json"  # in an exported folder: where it comes from, its files by hash, its gate
TOKENIZER_FILES = ("token", "vocab", "spiece", "sentencepiece", "merges", ".model")  # parts of their names
IDS = range(-(2**31), 2**31)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file; empty where there is no file. Raises CheckpointError for anything else."""
    try:
        body = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); write it anew") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{file}: holds a {type(body).__name__}, not a JSON object; write it anew")
    return body


def write_object(file: Path, body: dict[str, Any]) -> None:
    """Write settings as transformers lays them out; for folders that are still drafts."""
    file.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stop_ids_of(folder: Path) -> set[int]:
    """Ids that end a response, from the folder's generation and model configuration.

    Raises CheckpointError where an `eos_token_id` is neither an id nor a list of ids.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        given = read_json(folder / name).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        for wrong in (i for i in ids if type(i) is not int or i not in IDS):
            raise CheckpointError(
                f"{folder / name}: eos_token_id holds {wrong!r}, which is no id; correct it"
            )
        found.update(ids)
    return found


def refuse_unwhole(folder: Path) -> None:
    """Raise CheckpointError unless the folder is a model that can be loaded, or adapters: nothing is cut off.

    Looks at names, sizes and headers, at no weight.
    """
    try:
        names = {file.name for file in folder.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{folder}: is no folder ({error.strerror}); give a model folder") from error
    adapters = "adapter_config.json" in names
    config = "adapter_config.json" if adapters else "config.json"
    if config not in names:
        raise CheckpointError(f"{folder}: has no config.json, so it is no model; give a model folder")
    read_json(folder / config)
    index = "model.safetensors.index.json"
    named = set(read_json(folder / index).get("weight_map", {}).values()) if index in names else set()
    weights = named or ({"adapter_model.safetensors"} if adapters else {"model.safetensors"})
    if lacking := sorted(weights - names):
        raise CheckpointError(
            f"{folder}: {lacking[0]} is not there, so it is no whole model; export it again"
        )
    for name in sorted(weights):
        _refuse_cut_off(folder / name)
    if not adapters and not any(part in name for name in names for part in TOKENIZER_FILES):
        raise CheckpointError(f"{folder}: holds no tokenizer, so it is no whole model; export it again")


def _refuse_cut_off(file: Path) -> None:
    """A safetensors file says in its header how long it is."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = file.stat().st_size
            header = json.loads(opened.read(length)) if 0 < length < size else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); export the model again") from error
    if not ends or size != 8 + length + max(ends):
        raise CheckpointError(f"{file}: is cut off or no safetensors file; export the model again")


def open_weights(folder: Path) -> None:
    """Let read the weights whoever may read the rest: safetensors closes them to all but the writer."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def dtype_of(folder: Path) -> str:
    """The precision that a folder's configuration says its weights have; float32 where it does not say."""
    config = read_json(folder / "config.json")
    found = config.get("dtype", config.get("torch_dtype"))
    return found if isinstance(found, str) else "float32"


def weights_hash(folder: Path) -> str:
    """Content of a model folder's weights, configuration and tokenizer."""
    kinds = (".safetensors", ".json", ".jinja")
    return hash_all((path.name, path) for path in sorted(folder.iterdir()) if path.suffix in kinds)
