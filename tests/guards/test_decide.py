"""Every rule is asked, and the gravest answer wins."""

import itertools

import pytest

from rein.guards.decide import GRAVITY, decide
from rein.protocols import Guard
from rein.types import Action, Metrics, Verdict


def says(action: Action, reason: str = "") -> Guard:
    return lambda metrics: Verdict(action, reason)


def test_without_rules_the_run_goes_on() -> None:
    assert decide([], {}).action is Action.CONTINUE


def test_every_action_has_its_gravity() -> None:
    assert sorted(GRAVITY) == sorted(Action)
    assert GRAVITY[0] is Action.CONTINUE
    assert GRAVITY[-1] is Action.STOP


@pytest.mark.parametrize(("lighter", "graver"), list(itertools.combinations(GRAVITY, 2)))
def test_the_gravest_answer_wins_whatever_the_order(lighter: Action, graver: Action) -> None:
    rules = [says(lighter, "light"), says(graver, "grave")]
    assert decide(rules, {}) == decide(rules[::-1], {}) == Verdict(graver, "grave")


def test_every_rule_is_asked_so_that_each_keeps_count() -> None:
    asked: list[str] = []

    def rule(name: str, action: Action) -> Guard:
        def answer(metrics: Metrics) -> Verdict:
            asked.append(f"{name} {metrics['actor/loss']}")
            return Verdict(action)

        return answer

    decide([rule("a", Action.STOP), rule("b", Action.CONTINUE)], {"actor/loss": 2.0})
    assert asked == ["a 2.0", "b 2.0"]


def test_a_rule_that_raises_stops_the_run() -> None:
    def broken(metrics: Metrics) -> Verdict:
        raise KeyError("probe/kl_reference")

    with pytest.raises(KeyError):
        decide([broken, says(Action.CONTINUE)], {})
