"""Sizes of a recipe's models, from config.json and the headers of safetensors files alone.

Refuses files that are not as long as their headers say. Loads no weights. Part of commands/check.py.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rein.config import paths
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.errors import CheckpointError, shown
from rein.model_files import read_json
from rein.rewards import uses_model
from rein.stages import pipeline

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. `head`: entries of an untied output layer; `linear`: the blocks' matrices."""

    parameters: int
    hidden: int
    layers: int
    heads: int
    query: int  # numbers of all query heads of a position
    key_value: int
    intermediate: int
    vocabulary: int
    head: int
    linear: tuple[tuple[int, int], ...]
    gated: bool = False  # blocks are Llama's: four projections and a gated layer

    @property
    def ends(self) -> int:
        """Entries of embeddings and output layer."""
        return self.vocabulary * self.hidden + self.head

    @property
    def block(self) -> float:
        """Parameters of a block."""
        return (self.parameters - self.ends) / max(self.layers, 1)


def sizes(recipe: Recipe) -> dict[str, Shape | None]:
    """The models of a recipe, on disk or to be made from one that is; None where no size can be read."""
    base = paths.start_policy(recipe, "train")
    named: dict[str, str] = {"actor": base}
    if "critic" in needs(recipe):
        named["critic"] = paths.critic_start(recipe)
    if "reward" in recipe.stages:
        named["reward model"] = paths.reward_trunk(recipe)
    elif uses_model(recipe.score.reward):
        named["reward model"] = paths.reward_model(recipe)
    return {role: read_shape(_origin(recipe, path)) for role, path in named.items()}


def refuse_damaged(recipe: Recipe) -> None:
    """Raise CheckpointError where a model that a stage will open has weights that cannot be whole."""
    for stage in recipe.stages:
        for name in pipeline.stage_inputs(recipe, stage):
            folder = Path(name).expanduser()
            base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
            for each in [folder, Path(str(base))] if base else [folder]:
                for file in [*_weights(each), *each.glob("adapter_model*.safetensors")]:
                    _header(file)


def _origin(recipe: Recipe, path: str) -> Path:
    """The folder whose shape a model to be made will have."""
    seen = 0
    while (maker := pipeline.made_by(recipe, path)) and not Path(path).exists() and seen < 3:
        path = paths.reward_trunk(recipe) if maker == "reward" else paths.base_model(recipe)
        seen += 1
    return Path(path).expanduser()


def read_shape(folder: Path) -> Shape | None:
    """The shape of a model folder; None where its configuration or weights cannot be read."""
    adapter = read_json(folder / "adapter_config.json")
    if adapter and not (folder / "config.json").exists():
        return read_shape(Path(str(adapter.get("base_model_name_or_path", ""))))
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    layers = _first(config, "num_hidden_layers", "n_layer")
    tensors = _tensors(folder)
    if not hidden or not layers or not tensors:
        return None
    heads = _first(config, "num_attention_heads", "n_head") or 1
    width = config.get("head_dim") or hidden // heads
    # A block's matrices: not the embeddings (first in every model) and not the head.
    linear = [
        s for name, s in tensors.items() if len(s) == 2 and any(part.isdigit() for part in name.split("."))
    ]
    return Shape(
        parameters=sum(_size(shape) for shape in tensors.values()),
        hidden=hidden,
        layers=layers,
        heads=heads,
        query=heads * width,
        key_value=(config.get("num_key_value_heads") or heads) * width,
        intermediate=_first(config, "intermediate_size", "n_inner") or 4 * hidden,
        vocabulary=_first(config, "vocab_size") or 0,
        head=_size(tensors.get("lm_head.weight", ())) if "lm_head.weight" in tensors else 0,
        linear=tuple((shape[0], shape[1]) for shape in linear),
        gated=all(any(f".{part}.weight" in name for name in tensors) for part in ("q_proj", "gate_proj")),
    )


def _first(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _size(shape: tuple[int, ...]) -> int:
    product = 1
    for side in shape:
        product *= side
    return product


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors")) if folder.is_dir() else []


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, from the headers of the folder's safetensors files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in _weights(folder):
        found |= _header(file)
    return found


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name: 8 bytes of length, then JSON, then the numbers, up to the last one's end.

    Raises CheckpointError where the file is of another size.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entries = json.loads(stream.read(min(length, 2**27)))
        entries.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        size = file.stat().st_size
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except _UNREADABLE as error:
        raise CheckpointError(f"{file}: cannot be read ({shown(str(error))}); copy it anew") from error
    if size != whole:
        raise CheckpointError(f"{file}: has {size:,} bytes, its header says {whole:,}; copy it anew")
    return shapes
