"""Every rule is asked, and what fired comes back with the gravest first."""

import itertools
from typing import Any

import pytest

from rein.guards.decide import GRAVITY, decide
from rein.protocols import Guard
from rein.types import Action, Metrics, Verdict


class Says:
    """A guard that answers the same each time and counts how often it is asked."""

    def __init__(self, verdict: Verdict | None, name: str = "") -> None:
        self.verdict, self.name, self.asked = verdict, name, 0

    def __call__(self, metrics: Metrics) -> Verdict | None:
        self.asked += 1
        return self.verdict

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def restore(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def says(action: Action, reason: str = "") -> Says:
    return Says(Verdict(action, reason))


def test_where_nothing_fires_nothing_is_said() -> None:
    assert decide([], {}) == []
    assert decide([Says(None), Says(None)], {"actor/loss": 1.0}) == []


def test_every_action_has_its_gravity() -> None:
    assert sorted(GRAVITY) == sorted(Action)
    assert GRAVITY[0] is Action.CONTINUE
    assert GRAVITY[-1] is Action.STOP


@pytest.mark.parametrize(("lighter", "graver"), list(itertools.combinations(GRAVITY, 2)))
def test_all_that_fired_come_back_the_gravest_first_whatever_the_order(
    lighter: Action, graver: Action
) -> None:
    rules: list[Guard] = [says(lighter, "light"), Says(None), says(graver, "grave")]
    for order in itertools.permutations(rules):
        assert decide(order, {}) == [Verdict(graver, "grave"), Verdict(lighter, "light")]


def test_equally_grave_ones_stay_in_the_order_of_the_rules() -> None:
    rules = [says(Action.SKIP, "first"), says(Action.ROLLBACK, "back"), says(Action.SKIP, "second")]
    assert [verdict.reason for verdict in decide(rules, {})] == ["back", "first", "second"]


def test_every_rule_is_asked_so_that_each_keeps_count() -> None:
    rules = [says(Action.STOP), Says(None), says(Action.CONTINUE), says(Action.STOP)]
    for _ in range(3):
        decide(rules, {})
    assert [rule.asked for rule in rules] == [3, 3, 3, 3]


def test_a_rule_that_raises_stops_the_run() -> None:
    def broken(metrics: Metrics) -> Verdict:
        return Verdict(value=metrics["probe/kl_reference"])

    with pytest.raises(KeyError):
        decide([broken, says(Action.CONTINUE)], {})  # type: ignore[list-item]
