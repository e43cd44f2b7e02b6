"""A learner whose models are elsewhere: the plan is made here, gradients and steps are the crews'.

Where actor and critic are apart, the next update of the one is begun while the other's is waited for, since
only the values tie them; what comes in between and changes it (a remedy, a restore) drops what was begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rein.config.recipe import Recipe
from rein.learner.plan import Plan
from rein.runtime.crews import Asked, Crews
from rein.types import Experience, Metrics, Softening, Update

NAME = "learner"  # what the crews call theirs


class _Begun(NamedTuple):
    update: Update
    experience: Experience
    asked: Asked


class RemoteLearner(Plan):
    """What Learner is to the loop; every crew has a Learner of its own roles."""

    def __init__(
        self,
        recipe: Recipe,
        crews: Crews,
        roles: Sequence[str],
        *,
        kl_coef_in_loss: float,
        kl_coef_in_reward: float,
        longest_group: int = 1,
    ) -> None:
        super().__init__(
            recipe,
            roles,
            kl_coef_in_loss=kl_coef_in_loss,
            kl_coef_in_reward=kl_coef_in_reward,
            longest_group=longest_group,
        )
        self.crews = crews
        self._plan: list[Update] = []
        self._begun: dict[str, _Begun] = {}
        self._judged: set[str] = set()  # roles whose last gradients are neither applied nor dropped
        self._over: set[str] = set()  # roles of which nothing more is asked of this plan

    def updates(self, rows: int, batch: int, together: Sequence[Sequence[int]] | None = None) -> list[Update]:
        """The plan of a batch; what was begun of another is dropped."""
        plan = super().updates(rows, batch, together)
        if plan != self._plan:
            self.drop()
            self._over = set()
        self._plan = plan
        return plan

    def backward(self, update: Update, experience: Experience) -> Metrics:
        """Gradients of one mini-batch, and its metrics; weights untouched."""
        begun = self._begun.get(update.role)
        if begun is not None and (begun.update != update or begun.experience is not experience):
            self.forget(update.role)
        begun = self._begun.pop(update.role, None)
        self._judged.add(update.role)
        self._over.discard(update.role)
        asked = begun.asked if begun is not None else self._begin(update, experience)
        self._look_ahead(update, experience)
        found: Metrics = self.crews.of(update.role).answer(asked)
        return found

    def _begin(self, update: Update, experience: Experience) -> Asked:
        return self.crews.of(update.role).begin(NAME, "backward", update, experience)

    def _look_ahead(self, update: Update, experience: Experience) -> None:
        """Begin what the other crew has to do next."""
        if self._plan[update.number : update.number + 1] != [update]:  # of no plan: the critic's fit
            return
        for other in self._plan[update.number + 1 :]:
            apart = self.crews.of(other.role) is not self.crews.of(update.role)
            if apart:
                if other.role not in self._begun and other.role not in self._over and other.rows:
                    self._begun[other.role] = _Begun(other, experience, self._begin(other, experience))
                return

    def apply(self, role: str) -> None:
        """Clip and step this role's optimizer."""
        self._judged.discard(role)
        self.crews.of(role).send(NAME, "apply", role)

    def discard(self, role: str, rows: int | None = None) -> None:
        """Drop this role's gradients; its schedule advances. `rows`: of a mini-batch that was not made."""
        if role not in self._judged:
            self._over.add(role)
        self._judged.discard(role)
        self._leave(role)
        self.crews.of(role).send(NAME, "discard", role, rows)

    def forget(self, role: str) -> None:
        """Drop half-made gradients and advance nothing."""
        self._leave(role)
        self.crews.of(role).send(NAME, "forget", role)

    def shorten(self, role: str, steps: int) -> None:
        """So many steps of a role's schedule will not be made."""
        self.drop()
        self.crews.of(role).send(NAME, "shorten", role, steps)

    def soften(self, soft: Softening) -> None:
        """Take what remedies have made of rates, coefficients, clips and sizes."""
        if soft != self.soft:
            self.drop()
        self.soft = soft
        self._send_all("soften", soft)

    def control_kl(self, kl: float, rows: int, progress: float) -> None:
        """Move the KL coefficients, here and there alike."""
        self.drop()
        super().control_kl(kl, rows, progress)
        self._send_all("control_kl", kl, rows, progress)

    def drop(self) -> None:
        """Drop the gradients of what was begun ahead."""
        for role in list(self._begun):
            self.forget(role)

    def meta(self) -> dict[str, Any]:
        """As Learner's, of all roles."""
        found: dict[str, Any] = {}
        for role in self.roles:
            said = self.crews.of(role).call(NAME, "meta")
            found |= {role: said[role]}
            if role == "actor":
                found |= {"demonstrations": said["demonstrations"]}
        return self.coefficients() | found

    def _leave(self, role: str) -> None:
        """What was begun is not wanted; that it failed still is."""
        begun = self._begun.pop(role, None)
        if begun is not None:
            self.crews.of(role).leave(begun.asked)

    def _send_all(self, method: str, *given: Any) -> None:
        for crew in self.crews.all:
            crew.send(NAME, method, *given)
