"""What models say of rows, without gradient: token-budget micro-batches, shared by the ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rein.data.batches import row_batches, turns_of
from rein.protocols import Actor, Critic, Mesh, Reference
from rein.runtime.single import SINGLE
from rein.types import Trajectory


def padded(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
    """[B, T], right-padded with 0."""
    width = max(len(a) for a in arrays)
    out = torch.zeros(len(arrays), width, dtype=dtype)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = torch.tensor(array)
    return out


def temperatures(rows: Sequence[Trajectory]) -> Tensor:
    """[B], float64: each model casts them to its own precision."""
    return torch.tensor([row.temperature for row in rows], dtype=torch.float64)


def in_micro_batches(
    rows: Sequence[Trajectory],
    budget: int,
    compute: Callable[[list[Trajectory], Tensor], Tensor],  # rows, temperature [b] -> [b, t]
    *,
    share: bool = False,  # whether compute reads a prompt of several rows once
    mesh: Mesh = SINGLE,  # the ranks that share the work
) -> Tensor:
    """`compute` on token-budget micro-batches, without gradient; the answers back in order, [B, T]."""
    out: Tensor | None = None
    parts = row_batches(rows, budget, share=share, ranks=mesh.world_size)
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    with torch.no_grad():
        for part, counted in turns_of(parts, lengths, mesh):
            some = [rows[i] for i in part]
            found = compute(some, temperatures(some))
            if out is None:
                out = found.new_zeros(len(rows), max(len(row.response_ids) for row in rows))
            if counted:
                out[torch.tensor(part), : found.shape[1]] = found
    assert out is not None
    return mesh.add(out)


class Passes:
    """What models say of rows, without gradient, [B, T] each; ranks share the rows and know all answers."""

    def __init__(
        self,
        actor: Actor,
        critic: Critic | None,
        reference: Reference | None = None,
        mesh: Mesh = SINGLE,
    ) -> None:
        self.actor, self.critic, self.reference, self.mesh = actor, critic, reference, mesh

    def log_probs(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """log pi(token | before) of the actor."""
        actor = self.actor
        return self._of(actor, rows, budget, lambda part, temp: actor.log_probs(part, temp)[0])

    def exact_kl(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """KL(actor || reference) over the vocabulary."""
        actor, reference = self.actor, self.reference
        assert reference is not None
        return self._of(
            actor, rows, budget, lambda part, temp: actor.log_probs_and_kl(part, temp, reference)[2]
        )

    def values(self, rows: Sequence[Trajectory], budget: int) -> Tensor:
        """V of the critic."""
        critic = self.critic
        assert critic is not None
        return self._of(critic, rows, budget, lambda part, _: critic.values(part))

    def _of(
        self,
        model: Actor | Critic,
        rows: Sequence[Trajectory],
        budget: int,
        compute: Callable[[list[Trajectory], Tensor], Tensor],
    ) -> Tensor:
        return in_micro_batches(rows, budget, compute, share=model.shares_prompts, mesh=self.mesh)
