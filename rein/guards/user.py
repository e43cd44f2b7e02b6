"""A user's own rule, `"pkg.mod:name"` in guards.rules: metrics in, a verdict or nothing out.

What it raises or returns amiss is a UserCodeError. Its state is plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rein.config.guards import ACTIONS
from rein.errors import UserCodeError
from rein.guards.rules import action_of
from rein.types import Action, Metrics, Verdict


class UserRule:
    """A user's function of the metrics: it returns a Verdict, a word of a rule's `then`, or None to go on.

    A class is made once; its `state()` and `restore(state)`, where it has them, are kept with the run.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = self._ask(function) if isinstance(function, type) else function

    def __call__(self, metrics: Metrics) -> Verdict | None:
        found = self._ask(self.function, dict(metrics))
        if found is None or (isinstance(found, str | Verdict) and found in (Action.CONTINUE, Verdict())):
            return None
        try:
            return self._whole(
                found if isinstance(found, Verdict) else Verdict(found, f"{self.name} says {found}")
            )
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"guards.rules: {self.name} returned {found!r}; return None, a Verdict or one of "
                f"{', '.join(ACTIONS)}"
            ) from error

    def _whole(self, given: Verdict) -> Verdict:
        """With plain numbers, under this rule's name where it gives none."""
        action, to_best = action_of(given.action)
        return replace(
            given,
            action=action,
            to_best=to_best or given.to_best,
            rule=given.rule or self.name,
            value=float(given.value),
            limit=float(given.limit),
            remedies=tuple(dict(given.remedies).items()),
        )

    def state(self) -> dict[str, Any]:
        own = getattr(self.function, "state", None)
        kept = self._ask(own) if callable(own) else {}
        try:
            return dict(json.loads(json.dumps(kept)))
        except (TypeError, ValueError) as error:
            raise UserCodeError(
                f"guards.rules: {self.name} has a state that is no JSON ({error}); return a dict of numbers "
                "and text"
            ) from error

    def restore(self, state: dict[str, Any]) -> None:
        own = getattr(self.function, "restore", None)
        if callable(own):
            self._ask(own, state)

    def _ask(self, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except (Exception, SystemExit) as error:
            raise UserCodeError(
                f"guards.rules: {self.name} raised {type(error).__name__} ({error}); mend it "
                "and go on with the same command"
            ) from error
