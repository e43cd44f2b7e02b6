"""The loss of preference pairs: rows 2i and 2i + 1 of an experience are the chosen and the rejected response.

No critic, no advantages, no ratio: the anchor to the reference is in the loss itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rein.config.recipe import Recipe
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.learner.objective import Counts, Losses, Turn
from rein.protocols import Actor, Mesh
from rein.types import Experience


class PairObjective:
    """-log sigmoid of the margin, a mean over the pairs of the mini-batch."""

    def __init__(self, recipe: Recipe, actor: Actor) -> None:
        self.recipe, self.actor = recipe, actor

    def prepare(self, e: Experience, rows: Tensor, turns: Sequence[Turn], mesh: Mesh) -> None:
        """Nothing of the whole mini-batch is needed."""

    def __call__(self, e: Experience, index: Tensor, counts: Counts, kl_coef: float) -> Losses:
        """The loss of the pairs at `index`: each chosen row right before its rejected one."""
        assert e.ref_log_probs is not None
        own = self.recipe.actor.policy_loss
        log_probs, _ = self.actor.log_probs([e.rows[i] for i in index.tolist()], e.temperature[index])
        width = log_probs.shape[1]
        mask = e.response_mask[index, :width]
        reference = e.ref_log_probs[index, :width].where(mask, 0)
        found = PAIR_LOSSES[own.loss_mode](
            log_probs[0::2],
            log_probs[1::2],
            reference[0::2],
            reference[1::2],
            mask[0::2],
            mask[1::2],
            beta=own.dpo_beta,
            nll_coef=own.dpo_nll_coef,
            label_smoothing=own.dpo_label_smoothing,
        )
        pairs = max(counts.rows / 2, 1)
        loss = found.losses.sum() / pairs
        return loss, {
            "actor/loss": loss.item(),
            "actor/pg_loss": loss.item(),
            "actor/dpo_accuracy": found.right.double().sum().item() / pairs,
            "actor/dpo_margin": found.margin.double().sum().item() / pairs,
            "actor/dpo_nll": found.nll.double().sum().item() / pairs,
        }
