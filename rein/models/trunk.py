"""The decoder below a head, run over a pack of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rein.models.attention import can_share
from rein.models.load import trunk_of
from rein.models.packing import Packed, pack
from rein.types import TokenRow


def shares_prompts(model: Any) -> bool:
    """Whether rows of one micro-batch that answer the same prompt compute it once."""
    return can_share(model.config, model.device)


def run_trunk(model: Any, rows: Sequence[TokenRow], *, share: bool) -> tuple[Packed, Tensor]:
    """The pack of the rows and the last hidden state of each of its positions, [N, H]."""
    packed = pack(rows, model.device, share=share)
    out = trunk_of(model)(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        packing=packed.layout,
        use_cache=False,
    )
    return packed, out.last_hidden_state.squeeze(0)
