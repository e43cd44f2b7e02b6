"""Where a model lies, and what computes there: a CPU, or the GPU that is this process's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rein.config.recipe import Model
from rein.errors import ConfigError
from rein.models.varlen import require


class Place(NamedTuple):
    """Given to what loads a model."""

    device: str = "cpu"  # or cuda: this process's own among several
    attention: str = "auto"  # model.attn_implementation
    liger: bool = False

    @property
    def numbers(self) -> str:
        """What the last digits of a model's answers depend on."""
        if self.device == "cpu":
            return self.device
        return " ".join([self.device, self.attention] + ["liger"] * self.liger)


CPU = Place()


def place_of(model: Model) -> Place:
    """A GPU where there is one, unless the recipe names a device.

    Raises ConfigError where there is none and it asks for one, or for what only a GPU computes.
    """
    if model.device != "cpu" and torch.cuda.is_available():
        require(model.attn_implementation)
        return Place("cuda", model.attn_implementation, model.use_liger)
    if model.device == "cuda":
        raise ConfigError(
            "model.device: cuda, but torch sees no GPU here; install torch's build for it, or write cpu"
        )
    asked = {
        "model.attn_implementation": model.attn_implementation != "auto",
        "model.use_liger": model.use_liger,
    }
    for key in (key for key, given in asked.items() if given):
        raise ConfigError(f"{key}: is for a GPU, and models lie on the CPU here; remove it")
    return CPU


def loading(model: Model) -> dict[str, Any]:
    """How a model that is only read is loaded."""
    return {"dtype": model.dtype, "place": place_of(model), "trust_remote_code": model.trust_remote_code}
