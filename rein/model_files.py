"""The files of a Hugging Face model folder, without transformers: settings, ids that end answers, modes."""

import json
import shutil
from pathlib import Path
from typing import Any

from rein.errors import CheckpointError

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


def open_weights(folder: Path) -> None:
    """Let read the weights whoever may read the rest: safetensors closes them to all but the writer."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)
