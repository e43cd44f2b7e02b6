"""The KL that is watched: exact KL(actor || reference) over the vocabulary on fixed held-out rows.

The reference's last hidden states on those rows and its head are kept from the start, so no second model
stays in memory: [R, H] numbers and, where the head is trained, [V, H]. Needs no behavior log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rein.data.batches import row_batches, turns_of
from rein.functional.masked import masked_mean
from rein.models.actor import Actor
from rein.models.load import head_function
from rein.protocols import Mesh
from rein.runtime.single import SINGLE
from rein.sharded import frozen_copy, is_cut
from rein.types import Metrics, Trajectory

PROBE_ROWS = 64


class Probe:
    """Made while the actor still is the reference; measures whatever the actor has become."""

    def __init__(self, actor: Actor, rows: Sequence[Trajectory], budget: int, mesh: Mesh = SINGLE) -> None:
        self.actor = actor
        self.rows = list(rows)
        self.mesh = mesh
        parts = row_batches(rows, budget, share=actor.shares_prompts, ranks=mesh.world_size)
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
        self.turns = turns_of(parts, lengths, mesh)
        with torch.no_grad():
            self.hidden = [actor.hidden(self._some(part))[1].clone() for part, _ in self.turns]
        head = actor.model.get_output_embeddings()
        if any(parameter.requires_grad or is_cut(parameter) for parameter in head.parameters()):
            head = frozen_copy(head).to(actor.device)
        self.head = head_function(actor.model, head)

    def _some(self, part: list[int]) -> list[Trajectory]:
        return [self.rows[i] for i in part]

    def measure(self) -> Metrics:
        """probe/kl_reference and probe/entropy: means over response tokens, nats per token."""
        if not self.rows:
            return {}
        kl = entropy = tokens = 0.0
        for (part, counted), hidden in zip(self.turns, self.hidden, strict=True):
            some = self._some(part)
            temperature = torch.tensor([row.temperature for row in some], dtype=torch.float64)
            found_kl, found_entropy = self.actor.exact_kl(some, temperature, hidden, self.head)
            mask = torch.zeros_like(found_kl, dtype=torch.bool)
            for i, row in enumerate(some):
                mask[i, : len(row.response_mask)] = torch.tensor(row.response_mask)
            count = float(mask.sum()) if counted else 0.0
            kl += masked_mean(found_kl, mask).item() * count
            entropy += masked_mean(found_entropy, mask).item() * count
            tokens += count
        kl, entropy, tokens = self.mesh.sum([kl, entropy, tokens])
        return {"probe/kl_reference": kl / max(tokens, 1), "probe/entropy": entropy / max(tokens, 1)}
