"""The frozen start policy, read over the whole vocabulary: what an exact KL is measured against.

Made while the actor still is the start policy. With adapters it is the actor with them off and costs nothing;
else it is a copy of the model. R counts response tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from rein.models.actor import Actor
from rein.models.load import head_function
from rein.models.lora import adapters_off, has_lora
from rein.models.precision import half_copies
from rein.types import TokenRow


class Reference:
    """No gradient goes into it. `bytes`: the memory that it adds."""

    def __init__(self, actor: Actor) -> None:
        self.actor, self.bytes = actor, 0
        head = actor.model.get_output_embeddings()
        if has_lora(actor.model):
            head = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        else:
            model = copy.deepcopy(actor.model).requires_grad_(False)
            self.actor, head = Actor(model, actor.tokenizer, actor.path), model.get_output_embeddings()
            tensors = [*model.parameters(), *model.buffers(), *half_copies(model)]
            self.bytes = sum(tensor.nbytes for tensor in tensors)
        self._head = head_function(actor.model, head)

    @torch.no_grad()
    def hidden(self, rows: Sequence[TokenRow]) -> Tensor:
        """Last hidden states before each response token, [R, H], in the order of the rows' pack."""
        if self.bytes:
            return self.actor.hidden(rows)[1]
        with adapters_off(self.actor.model):  # amid the actor's own pass
            return self.actor.hidden_within(rows)[1]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V]"""
        return self._head(hidden)
