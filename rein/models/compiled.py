"""Decoder blocks through torch.compile, where they read packs; generation runs them as they are.

All blocks of a kind share their graphs, which hold for any length. A block is cut at its attention, which
walks over the pack's layout and runs as it is. What takes the place of a module's own forward in a block is
taken away: the compiler fuses the model's own steps.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rein.errors import ConfigError
from rein.models.load import trunk_of

KEY = "model.use_torch_compile"
GRAPHS = 64  # of one function, for all models of the process; past it torch runs the function as it is


def compile_blocks(model: Any, *, backend: str = "inductor") -> None:
    """The last thing done to a model. Raises ConfigError where machine or model cannot be compiled."""
    if backend == "inductor":
        refuse_without_compiler()
    torch._dynamo.config.recompile_limit = GRAPHS
    blocks = [part for part in trunk_of(model).modules() if isinstance(part, GradientCheckpointingLayer)]
    if not blocks:
        kind = model.config.model_type
        raise ConfigError(f"{KEY}: no decoder blocks are found in a {kind} model; write false")
    for block in blocks:
        for module in block.modules():
            module.__dict__.pop("forward", None)
        own: Any = type(block)
        block.__class__ = _compiled(own, backend)


@functools.cache
def _compiled(kind: Any, backend: str) -> Any:
    """A subclass with a compiled forward, around which transformers puts gradient checkpointing."""
    own = kind.forward
    # Each step rounds as by itself: passes with and without gradients must give the same numbers.
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if backend == "inductor" else None
    compiled = torch.compile(own, dynamic=True, backend=backend, options=options)

    class Compiled(kind):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            return (own if options.get("packing") is None else compiled)(self, *args, **options)

    Compiled.__name__ = kind.__name__
    return Compiled


@functools.cache
def refuse_without_compiler() -> None:
    """Compile one line, once a process. Raises ConfigError that says what is missing."""

    def twice(x: Tensor) -> Tensor:
        return x + x

    try:
        torch.compile(twice)(torch.ones(2))
    except Exception as error:  # torch's own of many kinds, with what the compiler's process said
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{KEY}: this machine cannot compile ({said}); install a C++ compiler (g++ or clang++, or set "
            "CXX) and Python's headers, or write false"
        ) from error
