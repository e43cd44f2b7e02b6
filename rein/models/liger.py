"""Liger's kernels in the place of a model's norms, gates and rotary positions.

Hsu et al. 2024, arXiv:2410.10989; package liger-kernel.
Its patch of a live model also changes transformers' own classes, for every model that is made later; that is
undone, so that models on a CPU stay as they are. Losses are not Liger's: heads are head.py's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rein.errors import ConfigError

ROTARY = "apply_rotary_pos_emb"  # of a module of transformers, called by its attention


class Rotary:
    """Liger's where queries lie on a GPU, else the model's own."""

    def __init__(self, own: Callable[..., Any], of_liger: Callable[..., Any]) -> None:
        self.own, self.of_liger = own, of_liger

    def __call__(self, q: Any, *rest: Any, **options: Any) -> Any:
        return (self.of_liger if q.is_cuda else self.own)(q, *rest, **options)


def use_liger(model: Any) -> None:
    """Patch a model that lies on a GPU.

    Raises ConfigError where the package is not installed, or does not know the architecture.
    """
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ConfigError(
            f"model.use_liger: package liger-kernel cannot be imported ({error}); install it, or write false"
        ) from error
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"model.use_liger: Liger knows no {kind} models; write false")
    of_transformers = sys.modules[type(model).__module__].__dict__
    before = dict(of_transformers)
    monkey_patch._apply_liger_kernel_to_instance(
        model=model, cross_entropy=False, fused_linear_cross_entropy=False
    )
    own, turned = before.get(ROTARY), of_transformers.get(ROTARY)
    of_transformers.update(before)
    if own is not None and turned is not None and turned is not own and not isinstance(own, Rotary):
        of_transformers[ROTARY] = Rotary(own, turned)
