"""SFT mixing: demonstrations beside the actor's updates, whose gradients are added to the mini-batch's.

The loss of both is (sum RL + coef sum NLL) / (RL tokens + SFT tokens), so the cut into micro-batches changes
nothing. Demonstrations touch no advantage, no whitening, no critic and no KL; the model is not tempered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from rein.config.recipe import Recipe
from rein.data.batches import row_batches, turns_of
from rein.data.mixing import Mixing
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.imitation import negative_log_likelihood
from rein.protocols import Actor, Mesh
from rein.types import Demonstration, Metrics


class Beside(NamedTuple):
    """What demonstrations do to the update they stand beside."""

    share: float  # of the mini-batch's tokens in all: what its own loss is multiplied by
    loss: float  # theirs, weighed by their share and coef
    metrics: Metrics


class Imitation:
    """Takes the demonstrations of one actor update after the other."""

    def __init__(self, recipe: Recipe, actor: Actor, mesh: Mesh, demonstrations: Mixing) -> None:
        self.recipe, self.actor, self.mesh, self.demonstrations = recipe, actor, mesh, demonstrations
        self._rows = 0  # of the last mini-batch

    def backward(self, rows: int, tokens: float, budget: int) -> Beside:
        """Gradients of the demonstrations beside a mini-batch of `rows` rows with `tokens` counted tokens.

        Their micro-batches hold `budget` tokens.
        """
        self._rows = rows
        some = self.demonstrations.beside(rows)
        count, theirs = float(len(some)), float(sum(int(row.response_mask.sum()) for row in some))
        if not count:
            return Beside(1.0, 0.0, {"actor/sft_rows": 0.0})
        share = tokens / (tokens + theirs)
        weight, mean = (1 - share) * self.recipe.sft.coef, 0.0
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in some]
        for numbers, counted in turns_of(self._cut(some, budget), lengths, self.mesh):
            part = [some[i] for i in numbers]
            log_probs, _ = self.actor.log_probs(part, torch.ones(len(part)))
            mask = pad_sequence([torch.from_numpy(row.response_mask) for row in part], batch_first=True)
            loss = aggregate(negative_log_likelihood(log_probs), mask, "token-mean", tokens=theirs)
            (weight * loss if counted else 0 * loss).backward()  # type: ignore[no-untyped-call]
            mean += loss.item() if counted else 0.0
        (mean,) = self.mesh.sum([mean])
        return Beside(share, weight * mean, {"actor/sft_rows": count, "actor/sft_loss": mean})

    def _cut(self, some: list[Demonstration], budget: int) -> list[list[int]]:
        actor = self.recipe.actor
        most = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size
        share, ranks = self.actor.shares_prompts, self.mesh.world_size
        return row_batches(some, budget, share=share, max_rows=most, ranks=ranks)

    def advance(self, rows: int | None = None) -> None:
        """The update is over, applied or discarded: the next one has other demonstrations.

        `rows`: of its mini-batch, where backward() has not seen it.
        """
        self.demonstrations.advance(self._rows if rows is None else rows)
