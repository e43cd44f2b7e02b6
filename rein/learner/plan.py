"""What an update is made of before any model is asked: its rows, coefficients and token budget.

Knows the recipe, counts of rows and the latest KL; no model, no tensor of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rein.config.recipe import Recipe
from rein.data.batches import chunks, even_cuts, mini_batch_count
from rein.functional.kl import adaptive_kl_coef, moving_average_kl
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.functional.schedules import over_progress
from rein.runtime.seeding import derive
from rein.types import Softening, Update


class Plan:
    """The order of updates and the KL coefficients of a run."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Sequence[str],
        *,
        kl_coef_in_loss: float,
        kl_coef_in_reward: float,
        longest_group: int = 1,  # most rows of a batch that a mini-batch must hold together
    ) -> None:
        self.recipe, self.roles, self.longest_group = recipe, tuple(roles), longest_group
        self.kl_coef_in_loss, self.kl_coef_in_reward = kl_coef_in_loss, kl_coef_in_reward
        self.soft = Softening()
        self.paired = recipe.actor.policy_loss.loss_mode in PAIR_LOSSES
        self.kl_average: float | None = None  # of the probe's readings

    def softened(self, kl_coef: float) -> float:
        """A coefficient as remedies leave it; a KL that is off stays off."""
        if not kl_coef:
            return 0.0
        return self.soft.kl_coef * (kl_coef if self.soft.kl_coef_at is None else self.soft.kl_coef_at)

    def coefficients(self) -> dict[str, float | None]:
        """What control_kl moves: a part of a run's state."""
        names = ("kl_coef_in_loss", "kl_coef_in_reward", "kl_average")
        return {name: getattr(self, name) for name in names}

    def take(self, meta: Mapping[str, Any]) -> None:
        """Put coefficients() back."""
        for name in self.coefficients():
            setattr(self, name, meta[name])

    def updates(self, rows: int, batch: int, together: Sequence[Sequence[int]] | None = None) -> list[Update]:
        """The plan for a batch of `rows`: the critic's epochs, then the actor's, each in its mini-batches.

        A function of the data seed and the batch's number alone, so a resumed run makes the same plan. Rows
        that `together` lists with each other are in one mini-batch; sizes then differ a little. Where the
        critic has workers of its own the roles alternate, and an epoch that remedies took has empty updates.
        """
        apart = self.recipe.critic.placement == "separate"
        found: list[tuple[float, str, tuple[int, ...]]] = []  # with its place in the recipe's own epochs
        for role in (role for role in ("critic", "actor") if role in self.roles):
            plan: list[tuple[int, ...]] = []
            epochs, own = self._epochs(role), epochs_of(self.recipe, role)
            for epoch in range(max(epochs, own) if apart else epochs):
                size, generator = mini_batch_size(self.recipe, role), self._generator(role, batch, epoch)
                if together is None:
                    parts = chunks(self._order(rows, generator), size)
                else:
                    order = self._shuffled(len(together), generator)
                    count = mini_batch_count(rows, size, self.longest_group)
                    parts = even_cuts([together[i] for i in order], count)
                plan += [tuple(part) if epoch < epochs else () for part in parts]
            found += [((i + 0.5) / (len(parts) * own), role, part) for i, part in enumerate(plan)]
        if apart:  # what remedies add comes last, so that what is done stays the first part of the plan
            found.sort(key=lambda one: one[0])
        return [Update(role, part, number) for number, (_, role, part) in enumerate(found)]

    def _epochs(self, role: str) -> int:
        more = self.soft.ppo_epochs if role == "actor" else 0  # the critic's come first: its plan stays
        return max(epochs_of(self.recipe, role) + more, 1)

    def _generator(self, role: str, batch: int, epoch: int) -> torch.Generator:
        seed = derive(self.recipe.data_seed, "updates", role, batch, epoch)
        return torch.Generator().manual_seed(seed)

    def _shuffled(self, count: int, generator: torch.Generator) -> list[int]:
        if not self.recipe.actor.shuffle:
            return list(range(count))
        return torch.randperm(count, generator=generator).tolist()

    def _order(self, rows: int, generator: torch.Generator) -> list[int]:
        if self.paired:
            pairs = self._shuffled(rows // 2, generator)
            return [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]
        return self._shuffled(rows, generator)

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch; a longer row is one by itself."""
        return max(int(self.recipe.actor.token_budget * self.soft.token_budget), 1)

    def control_kl(self, kl: float, rows: int, progress: float) -> None:
        """Move the KL coefficients, once per batch of `rows`.

        `kl` is the latest probe's (NaN: there is none), `progress` the share of the run that is done.
        """
        control = self.recipe.algorithm.kl_ctrl
        if control.type == "schedule" and control.schedule is not None:
            coef = over_progress(progress, control.schedule, shape=control.shape)
            self.kl_coef_in_loss = coef if self.recipe.actor.use_kl_loss else 0.0
            self.kl_coef_in_reward = coef if self.recipe.algorithm.use_kl_in_reward else 0.0
        if control.type == "moving_average":
            self.kl_average = moving_average_kl(self.kl_average, kl, rows=rows, horizon=control.horizon)
            kl = self.kl_average if self.kl_average is not None and math.isfinite(kl) else math.nan
        if control.type in ("adaptive", "moving_average"):
            move = partial(
                adaptive_kl_coef, kl=kl, rows=rows, target_kl=control.target_kl, horizon=control.horizon
            )
            self.kl_coef_in_loss, self.kl_coef_in_reward = (
                move(self.kl_coef_in_loss),
                move(self.kl_coef_in_reward),
            )


def mini_batch_size(recipe: Recipe, role: str) -> int:
    """Rows per optimizer step; the critic's follows the actor's unless given."""
    own = recipe.critic.ppo_mini_batch_size if role == "critic" else None
    return own or recipe.actor.ppo_mini_batch_size


def epochs_of(recipe: Recipe, role: str) -> int:
    """Passes over a batch; the critic's follow the actor's unless given."""
    own = recipe.critic.ppo_epochs if role == "critic" else None
    return own or recipe.actor.ppo_epochs


def optimizer_steps(recipe: Recipe, role: str, batches: Mapping[int, int], longest_group: int = 1) -> int:
    """Optimizer steps of a role over so many batches of each size; a short last mini-batch is a step."""
    size = mini_batch_size(recipe, role)
    steps = sum(mini_batch_count(rows, size, longest_group) * count for rows, count in batches.items())
    return steps * epochs_of(recipe, role)
