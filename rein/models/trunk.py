"""The decoder below a head, run over a pack of rows; a whole pass as one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rein.models.attention import can_share
from rein.models.load import trunk_of
from rein.models.packing import Packed, pack
from rein.models.ulysses import Slices
from rein.types import TokenRow


def shares_prompts(model: Any) -> bool:
    """Whether rows of one micro-batch that answer the same prompt compute it once."""
    return can_share(model.config, model.device)


class Whole(nn.Module):
    """A model's pass as one module's forward, trunk and head: what cuts a model from outside needs one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *given: Any, **options: Any) -> Any:
        return compute(*given, **options)


class OfTrunk(Protocol):
    """A role: its model, and where the model computes, which need not be where its parameters wait."""

    model: Any
    device: torch.device
    shares_prompts: bool


def run_trunk(
    role: OfTrunk, rows: Sequence[TokenRow], *, slices: Slices | None = None
) -> tuple[Packed, Tensor]:
    """The pack of the rows or this rank's slice of it, and the last hidden state of each position, [N, H]."""
    packed = pack(rows, role.device, share=role.shares_prompts)
    if slices is not None:
        packed = slices.cut(packed)
    out = trunk_of(role.model)(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        packing=packed.layout,
        use_cache=False,
    )
    return packed, out.last_hidden_state.squeeze(0)
