"""The rules: frozen settings and what they have read so far; metrics in, a verdict out.

A rule reads its metric wherever it turns up, and is quiet where it does not. State is plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rein.config.guards import Condition, Rule
from rein.types import Action, Metrics, Verdict

WINDOW, REST = 5, 3  # readings
WORSE = {"falls": max, "below": max, "rises": min, "above": min}  # the best so far, seen from a test


@dataclass(slots=True)
class Readings:
    """What a condition has read: the newest last, at most its window and one."""

    first: float | None = None
    best: float | None = None
    last: list[float] = field(default_factory=list)


class Watch:
    """One condition over time."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self.kind = tests_of(condition)[0]
        self.window = condition.window or WINDOW
        self.readings = Readings()

    def read(self, metrics: Metrics) -> bool:
        """Take the metric in; False where it is not there."""
        value = metrics.get(self.condition.metric or "")
        if value is None:
            return False
        seen = self.readings
        seen.last = [*seen.last, value][-self.window - 1 :]
        if math.isfinite(value):
            seen.first = value if seen.first is None else seen.first
            if len(seen.last) > 1 and math.isfinite(seen.last[-2]):  # the newest is no baseline for itself
                before, better = seen.last[-2], WORSE.get(self.kind, max)
                seen.best = before if seen.best is None else better(seen.best, before)
        return True

    def holds(self) -> tuple[bool, float, float]:
        """Whether the test holds of what was read last, the value it looked at and the limit."""
        if not self.readings.last:
            return False, math.nan, math.nan
        amount = float(getattr(self.condition, self.kind))
        return KINDS[self.kind](self, amount)

    def value(self) -> float:
        """The newest reading, the first, or mean or deviation of the last `window` (NaN until there are so
        many).
        """
        recent = self.readings.last[-self.window :]
        if self.condition.of in (None, "value"):
            return recent[-1]
        if self.condition.of == "start":
            return math.nan if self.readings.first is None else self.readings.first
        if len(recent) < self.window:
            return math.nan
        mean = sum(recent) / len(recent)
        if self.condition.of == "mean":
            return mean
        return math.sqrt(sum((x - mean) * (x - mean) for x in recent) / len(recent))  # ** overflows

    def baseline(self) -> float:
        """What the limit is relative to; NaN while it is not known."""
        seen, against = self.readings, self.condition.against or "start"
        if against == "average":
            before = [x for x in seen.last[:-1] if math.isfinite(x)]
            return sum(before) / len(before) if len(before) >= self.window else math.nan
        known = seen.first if against == "start" else seen.best
        return math.nan if known is None else known


Found = tuple[bool, float, float]


def _above(watch: Watch, amount: float) -> Found:
    limit = amount * watch.baseline() if watch.condition.against else amount
    return watch.value() > limit, watch.value(), limit


def _below(watch: Watch, amount: float) -> Found:
    limit = amount * watch.baseline() if watch.condition.against else amount
    return watch.value() < limit, watch.value(), limit


def _rises(watch: Watch, amount: float) -> Found:
    limit = watch.baseline() + amount
    return watch.value() > limit, watch.value(), limit


def _falls(watch: Watch, amount: float) -> Found:
    limit = watch.baseline() - amount
    return watch.value() < limit, watch.value(), limit


def _flat(watch: Watch, amount: float) -> Found:
    recent = watch.readings.last[-watch.window :]
    if len(recent) < watch.window or not all(map(math.isfinite, recent)):
        return False, math.nan, amount
    spread = max(recent) - min(recent)
    return spread <= amount, spread, amount


def _not_finite(watch: Watch, amount: float) -> Found:
    return not math.isfinite(watch.value()), watch.value(), math.inf


KINDS: dict[str, Callable[[Watch, float], Found]] = {
    "above": _above,
    "below": _below,
    "rises": _rises,
    "falls": _falls,
    "flat": _flat,
    "not_finite": _not_finite,
}


def tests_of(condition: Condition) -> list[str]:
    """The tests that a condition names; it should be one."""
    given = {kind: getattr(condition, kind) for kind in KINDS}
    return [kind for kind, amount in given.items() if amount is not None and amount is not False]


def action_of(word: str) -> tuple[Action, bool]:
    """What a word of `then` asks for, and whether a rollback goes to the best. Raises ValueError."""
    if word in ("alert", "rollback_to_best"):
        return (Action.CONTINUE, False) if word == "alert" else (Action.ROLLBACK, True)
    return Action(word), False


def remedies_of(rule: Rule) -> tuple[tuple[str, Any], ...]:
    """Name and amount of each, in order."""
    return tuple(item for step in rule.then or [] if isinstance(step, dict) for item in step.items())


class RuleGuard:
    """A rule of the recipe or of a preset, complete."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name = rule.name or rule.metric or ""
        self.watch = Watch(rule)
        self.others = [Watch(condition) for condition in rule.when or []]
        words = [step for step in rule.then or [] if isinstance(step, str) and step != "alert"]
        self.action, self.to_best = action_of(words[0] if words else "alert")
        self.remedies = remedies_of(rule)
        at_once = self.action in (Action.SKIP, Action.STOP_EPOCHS)
        self.rest = rule.rest if rule.rest is not None else 0 if at_once else REST
        self.held = self.quiet = 0

    def __call__(self, metrics: Metrics) -> Verdict | None:
        """A verdict where the rule fires; None where it does not, or its metric is not there."""
        for other in self.others:
            other.read(metrics)
        if not self.watch.read(metrics):
            return None
        if self.quiet:
            self.quiet -= 1
            return None
        holds, value, limit = self.watch.holds()
        holds = holds and all(other.holds()[0] for other in self.others)
        self.held = self.held + 1 if holds else 0
        if self.held < (self.rule.patience or 1):
            return None
        self.held, self.quiet = 0, self.rest
        return Verdict(
            self.action, self._said(value, limit), self.name, self.rule.metric or "", value, limit,
            self.remedies, self.to_best,
        )  # fmt: skip

    def _said(self, value: float, limit: float) -> str:
        """probe/kl_reference 0.31 is above 0.3 (3 readings)"""
        what = (
            self.rule.metric if self.rule.of in (None, "value") else f"{self.rule.of} of {self.rule.metric}"
        )
        if self.watch.kind == "not_finite":
            return f"{what} is {value}"
        if self.watch.kind == "flat":
            return f"{what} moved by {value:.3g} in {self.watch.window} readings, {limit:.3g} or less"
        side = "above" if self.watch.kind in ("above", "rises") else "below"
        patience = self.rule.patience or 1
        return f"{what} {value:.4g} is {side} {limit:.4g}" + (
            f" ({patience} readings)" if patience > 1 else ""
        )

    def _tests(self) -> list[str]:
        return [f"{watch.kind} {watch.condition.metric}" for watch in (self.watch, *self.others)]

    def state(self) -> dict[str, Any]:
        watches = [asdict(watch.readings) for watch in (self.watch, *self.others)]
        return {"held": self.held, "quiet": self.quiet, "tests": self._tests(), "watches": watches}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what a rule of this name had read, unless by other tests; a limit may be another."""
        if state["tests"] != self._tests():
            return
        self.held, self.quiet = state["held"], state["quiet"]
        for watch, found in zip((self.watch, *self.others), state["watches"], strict=True):
            watch.readings = Readings(**found)


@dataclass(slots=True)
class NotFinite:
    """Skips an update whose loss or gradient is not finite; stops after `max_skips` of one role in a row."""

    max_skips: int
    remedies: tuple[tuple[str, Any], ...] = ()
    skips: dict[str, int] = field(default_factory=dict)  # role, the `critic` of `critic/vf_loss` -> how many
    name: str = "not_finite"

    def __call__(self, metrics: Metrics) -> Verdict | None:
        watched = [name for name in metrics if name.endswith(("grad_norm", "loss"))]
        bad = [name for name in watched if not math.isfinite(metrics[name])]
        if not bad:
            self.skips |= {name.partition("/")[0]: 0 for name in watched}
            return None
        role = bad[0].partition("/")[0]
        skips = self.skips[role] = self.skips.get(role, 0) + 1
        reason, action = f"{bad[0]} is {metrics[bad[0]]}", Action.SKIP
        if skips >= self.max_skips:
            reason = f"{reason}, {skips} updates in a row; lower the learning rate or check the rewards"
            action = Action.STOP
        return Verdict(action, reason, self.name, bad[0], metrics[bad[0]], math.inf, self.remedies)

    def state(self) -> dict[str, Any]:
        return {"skips": dict(self.skips)}

    def restore(self, state: dict[str, Any]) -> None:
        self.skips = dict(state["skips"])
