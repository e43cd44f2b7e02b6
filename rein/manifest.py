"""What a stage made: hashes of its inputs, resolved recipe, seed, versions, rows, facts - in manifest.json.

Its fingerprint (stage, inputs by content, the settings that the stage reads) says whether the stage is done.
Knows which sections of a recipe each stage reads; knows nothing of what the stages do.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from rein import __version__
from rein.config.load import resolved, write_json
from rein.config.paths import PLACES
from rein.config.recipe import Recipe
from rein.hashing import hash_all, hash_file

NAME = "manifest.json"
VERSION = 1
PACKAGES = ("torch", "transformers", "numpy", "pyarrow")

# The sections and keys of a recipe that change what a stage writes. `seed` counts everywhere; `out`,
# `threads`, `resume`, `cache` and where it is run (`runtime`, `nproc`, `nnodes`, `restarts`, `fsdp`, `ray`,
# what of the model is about GPUs) nowhere.
_ROWS = ("model", "data")
_ANSWERS = (
    "rollout.max_new_tokens",
    "rollout.stop",
    "score.reward",
    "score.path",
)  # validation and evaluation
READS: Mapping[str, tuple[str, ...]] = {
    "sft": (*_ROWS, "sft"),
    "reward": (*_ROWS, "reward"),
    "rollout": (*_ROWS, "rollout"),
    "score": (*_ROWS, "score"),
    "train": (
        *(*_ROWS, *_ANSWERS, "evaluate.reward", "evaluate.generate"),
        *("actor", "critic", "algorithm", "reward_manager", "trainer", "guards"),
        *("sft.share", "sft.coef", "sft.prompt_key", "sft.response_key"),
    ),
    "evaluate": (*_ROWS, *_ANSWERS, "evaluate"),
    "export": ("model", "gate", "export"),
}
OF_ASKING = {  # of rollout's engines: what no answer follows from
    "server": {"concurrency", "timeout", "retries", "api_key_env"},
    "vllm": {"python", "start_timeout"},
}
_WHERE_RUN = ("device", "attn_implementation", "use_liger")  # of the model
_NO_EFFECT = {
    "trainer": ("logger", "project_name", "experiment_name", "save_freq", "profile", "keep_trajectories")
}
_ONLY_TRAIN = {
    "data": ("train_batch_size", "val_files", "behavior", "behavior_model"),
    "sft": ("share", "coef"),
}


def write(
    folder: Path,
    *,
    stage: str,
    recipe: Recipe,
    inputs: Sequence[str],
    rows: Mapping[str, int],
    facts: Mapping[str, Any],
    seconds: float,
) -> None:
    """Write manifest.json, whole or not at all: from now on `is_done` is true for the same work."""
    hashes = {name: hash_input(name) for name in inputs}
    body = {
        "version": VERSION,
        "stage": stage,
        "fingerprint": _fingerprint(recipe, stage, hashes),
        "seed": recipe.seed,
        "rows": dict(rows),
        "seconds": round(seconds, 2),
        "inputs": hashes,
        "outputs": sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name != NAME),
        "facts": _jsonable(facts),
        "versions": versions(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "recipe": resolved(recipe),
    }
    write_json(folder / NAME, body)


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where there is none that can be read."""
    try:
        body = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) and body.get("version") == VERSION else None


def fingerprint(recipe: Recipe, stage: str, inputs: Sequence[str]) -> str:
    """Equal for equal work: the stage, what its inputs hold, the settings it reads, Rein's version."""
    return _fingerprint(recipe, stage, {name: hash_input(name) for name in inputs})


def is_done(folder: Path, wanted: str) -> bool:
    """Whether the folder holds the whole result of the work with this fingerprint."""
    body = read(folder)
    if body is None or body.get("fingerprint") != wanted:
        return False
    written = [folder / name for name in body.get("outputs", [])]
    facts = body.get("facts", {})  # export and report may write outside their folder, and say where
    written += [Path(facts[key]) for key in ("to", "report") if facts.get(key)]
    return all(path.exists() for path in written)


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A draft folder that takes the place of `folder` when the block ends well, and else is removed.

    For stages whose result is all or nothing; what a killed run left of its draft is removed first.
    """
    draft = folder.parent / f".{folder.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        former = folder.parent / f".{folder.name}.former"
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        draft.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def versions() -> dict[str, str]:
    """Of Python, Rein and the packages whose version can change a result; nothing is imported for it."""
    found = {"python": platform.python_version(), "rein": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def function_file(name: str) -> str | None:
    """The file of a user's `pkg.mod:name`, so that editing the function counts as other work."""
    module, colon, _ = name.partition(":")
    file = f"{module.replace('.', os.sep)}.py"
    return file if colon and os.path.isfile(file) else None


def hash_input(name: str) -> str:
    """sha256 of a file, or of names and hashes of a folder's or pattern's files; else `absent`."""
    path = Path(name).expanduser()
    if path.is_file():
        return hash_file(path)
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))
        )
        return hash_all([(str(file.relative_to(path)), file) for file in files if file.name != NAME])
    if any(sign in name for sign in "*?["):
        return hash_all([(found, Path(found)) for found in sorted(glob.glob(str(path), recursive=True))])
    return "absent"


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def settings_read(recipe: Recipe, stage: str) -> dict[str, Any]:
    """What a stage reads of a recipe, with places of files and models left out: their content counts."""
    settings = resolved(recipe)
    for key in PLACES:  # where inputs lie does not count, only what they hold: a run folder may be moved
        section, _, name = key.rpartition(".")
        place = _at(settings, section)
        place[name] = len(place[name]) if isinstance(place[name], list) else bool(place[name])
    for section, keys in (_NO_EFFECT if stage == "train" else _ONLY_TRAIN).items():
        settings[section] = {key: value for key, value in settings[section].items() if key not in keys}
    if settings["critic"]["placement"] == "colocated":  # as it was when there was no other
        del settings["critic"]["placement"]
    for key in _WHERE_RUN:
        del settings["model"][key]
    for engine, left_out in OF_ASKING.items():
        own = settings["rollout"][engine]
        settings["rollout"][engine] = {key: value for key, value in own.items() if key not in left_out}
    found = {key: _at(settings, key) for key in (*READS.get(stage, ()), "seed")}
    return found | {"runtime": "single"}  # as it was when it counted


def _fingerprint(recipe: Recipe, stage: str, hashes: Mapping[str, str]) -> str:
    work = [VERSION, __version__, stage, list(hashes.values()), settings_read(recipe, stage)]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


def _at(settings: Mapping[str, Any], key: str) -> Any:
    section, _, rest = key.partition(".")
    return _at(settings[section], rest) if rest else settings[section]


def _jsonable(value: Any) -> Any:
    """Numbers, text, lists and mappings as JSON has them; NaN becomes null, paths and numpy numbers plain."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = value.item() if hasattr(value, "item") else value
    if isinstance(item, float):
        return item if abs(item) < float("inf") else None
    return item
