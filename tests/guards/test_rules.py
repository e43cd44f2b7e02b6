"""What each kind of test says of a row of readings; a restored rule goes on as if it had never left."""

import itertools
import json
import math
import random
from typing import Any

import pytest

from rein.config.guards import Rule
from rein.guards.rules import KINDS, REST, WINDOW, NotFinite, RuleGuard
from rein.types import Action, Verdict

NAN, INF = math.nan, math.inf
METRIC = "probe/kl_reference"


def guard(**given: Any) -> RuleGuard:
    return RuleGuard(Rule.model_validate({"metric": METRIC, "rest": 0} | given))


def fired(rule: RuleGuard, readings: list[float]) -> list[int]:
    """At which readings, counted from 0, it fires."""
    return [i for i, value in enumerate(readings) if rule({METRIC: value}) is not None]


# the tests, one by one


@pytest.mark.parametrize(
    ("rule", "readings", "expected"),
    [
        ({"above": 0.3}, [0.1, 0.3, 0.31, INF, -1], [2, 3]),
        ({"below": 0.3}, [0.1, 0.3, 0.29, -INF, 1], [0, 2, 3]),
        ({"above": 2, "against": "start"}, [0.1, 0.2, 0.21, 0.05], [2]),
        ({"below": 0.5, "against": "start"}, [2.0, 1.0, 0.9, 3.0], [2]),
        # The average of the window before the reading; none before there are so many.
        ({"above": 2, "against": "average", "window": 2}, [1, 9, 9, 11, 19, 31], [5]),
        ({"below": 0.5, "against": "average", "window": 2}, [4, 0, 4, 0.9, 9], [3]),
        # The best before the reading, seen from the test: falls, below look for high, rises, above for low.
        ({"above": 2, "against": "best"}, [4, 7, 9, 2, 3.9, 4.1], [2, 5]),
        ({"below": 0.5, "against": "best"}, [2, 4, 1.9, 2.1, 1], [2, 4]),
        ({"rises": 0.5}, [1.0, 1.5, 1.6, 1.2], [2]),
        ({"falls": 0.5}, [1.0, 0.5, 0.4, 0.8], [2]),
        ({"rises": 0.5, "against": "best"}, [1.0, 1.6, 0.5, 1.1, 0.9], [1, 3]),
        ({"falls": 0.5, "against": "best"}, [0.0, 1.0, 0.4, 0.6, 1.2, 0.65], [2, 5]),
        ({"rises": 0.5, "against": "average", "window": 2}, [9, 1, 1, 1.6, 1.7], [3]),
        ({"falls": 0.5, "against": "average", "window": 2}, [0, 2, 2, 1.4, 1.3], [3]),
        ({"flat": 0.25, "window": 3}, [1, 1, 1, 1.25, 1.5, 1.75, 1.625], [2, 3, 6]),
        ({"flat": 0.0}, [1.0] * WINDOW + [2.0], [WINDOW - 1]),
        ({"not_finite": True}, [1, NAN, 2, INF, -INF, 3], [1, 3, 4]),
        ({"above": 2, "of": "mean", "window": 2}, [9, 1, 3.5, 0], [1, 2]),
        ({"above": 0.9, "of": "std", "window": 2}, [0, 1.7, 3.6, 3.6], [2]),
        ({"above": 2, "of": "start"}, [3, 0, 0], [0, 1, 2]),
        ({"above": 2, "of": "start"}, [1, 9, 9], []),
        ({"above": 2, "of": "value"}, [1, 9, 0], [1]),
        ({"above": 0.3, "for": 3}, [1, 1, 0, 1, 1, 1, 1, 1, 1, 0], [5, 8]),
        ({"above": 0.3, "rest": 2}, [1, 1, 1, 1, 0, 0, 1], [0, 3, 6]),
        ({"above": 0.3, "for": 2, "rest": 2}, [1, 1, 1, 1, 1, 1], [1, 5]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_a_rule_fires_exactly_where_its_test_says(
    rule: dict[str, Any], readings: list[float], expected: list[int]
) -> None:
    assert fired(guard(**rule), readings) == expected


def test_every_kind_is_tested_above() -> None:
    tested = test_a_rule_fires_exactly_where_its_test_says.pytestmark[0].args[1]
    assert {kind for rule, _, _ in tested for kind in rule if kind in KINDS} == set(KINDS)


def test_the_best_is_what_was_read_before_so_the_newest_never_is_its_own_baseline() -> None:
    rule = guard(falls=0.0, against="best")
    assert fired(rule, [1.0]) == []
    assert fired(rule, [2.0, 1.9]) == [1]


def test_without_its_metric_a_rule_neither_counts_nor_forgets() -> None:
    rule = guard(above=0.3, **{"for": 2})
    assert rule({METRIC: 1.0}) is None
    assert rule({"actor/loss": 9.0}) is None
    assert rule({METRIC: 1.0}) is not None


def test_another_condition_must_hold_too_as_it_was_last_read() -> None:
    rule = guard(
        above=0.3, when=[{"metric": "val/score", "falls": 0.1}, {"metric": "probe/entropy", "below": 1}]
    )
    assert rule({METRIC: 1.0}) is None  # neither was ever read
    rule({"val/score": 0.9, "probe/entropy": 0.5})
    assert rule({METRIC: 1.0}) is None
    rule({"val/score": 0.7})
    assert rule({METRIC: 1.0}) is not None
    assert rule({METRIC: 1.0, "probe/entropy": 2.0}) is None  # read in the same metrics: counts at once
    assert rule({METRIC: 0.1, "probe/entropy": 0.5}) is None
    assert rule({METRIC: 1.0}) is not None


def test_patience_starts_anew_where_another_condition_fails() -> None:
    rule = guard(above=0.3, when={"metric": "val/score", "below": 0.5}, **{"for": 2})
    found = [rule({METRIC: 1.0, "val/score": score}) is not None for score in (0, 1, 0, 0)]
    assert found == [False, False, False, True]


@pytest.mark.parametrize(
    ("then", "rest"), [("skip", 0), ("stop_epochs", 0), ("rollback", REST), ("alert", REST), ("pause", REST)]
)
def test_what_can_prevent_has_no_rest_unless_it_is_given(then: str, rest: int) -> None:
    assert RuleGuard(Rule(metric=METRIC, above=0, then=[then])).rest == rest
    assert RuleGuard(Rule(metric=METRIC, above=0, then=[then], rest=5)).rest == 5


# the verdict


@pytest.mark.parametrize(
    ("rule", "readings", "said"),
    [
        ({"above": 0.3}, [0.31], "probe/kl_reference 0.31 is above 0.3"),
        ({"above": 0.3, "for": 2}, [1, 0.31], "probe/kl_reference 0.31 is above 0.3 (2 readings)"),
        ({"falls": 0.5}, [2, 1], "probe/kl_reference 1 is below 1.5"),
        ({"rises": 0.5}, [2, 3], "probe/kl_reference 3 is above 2.5"),
        ({"above": 2, "against": "start"}, [2, 5], "probe/kl_reference 5 is above 4"),
        (
            {"flat": 0.5, "window": 2},
            [1, 1.25],
            "probe/kl_reference moved by 0.25 in 2 readings, 0.5 or less",
        ),
        ({"not_finite": True}, [NAN], "probe/kl_reference is nan"),
        ({"above": 1, "of": "mean", "window": 2}, [1, 3], "mean of probe/kl_reference 2 is above 1"),
    ],
)
def test_a_verdict_says_what_was_read_and_the_limit(
    rule: dict[str, Any], readings: list[float], said: str
) -> None:
    some = guard(**rule)
    found = [some({METRIC: value}) for value in readings]
    assert found[:-1] == [None] * (len(readings) - 1)
    assert found[-1] is not None
    assert found[-1].reason == said


@pytest.mark.parametrize(
    ("then", "action", "to_best", "remedies"),
    [
        (None, Action.CONTINUE, False, ()),
        (["alert"], Action.CONTINUE, False, ()),
        ([{"lr": 0.5}], Action.CONTINUE, False, (("lr", 0.5),)),
        (["skip"], Action.SKIP, False, ()),
        (["stop_epochs"], Action.STOP_EPOCHS, False, ()),
        (["rollback", {"lr": 0.5}, {"kl_coef": 2}], Action.ROLLBACK, False, (("lr", 0.5), ("kl_coef", 2))),
        ([{"lr": 0.5}, "rollback_to_best"], Action.ROLLBACK, True, (("lr", 0.5),)),
        (["refresh"], Action.REFRESH, False, ()),
        (["alert", "pause"], Action.PAUSE, False, ()),
        (["stop"], Action.STOP, False, ()),
    ],
)
def test_then_becomes_an_action_and_its_remedies_in_order(
    then: Any, action: Action, to_best: bool, remedies: Any
) -> None:
    found = guard(above=0.3, then=then, name="kl")({METRIC: 0.4})
    assert found is not None
    assert (found.action, found.to_best, found.remedies) == (action, to_best, remedies)
    assert (found.rule, found.metric, found.value, found.limit) == ("kl", METRIC, 0.4, 0.3)


# what is not finite


EVERY = [
    {kind: amount} | ({"against": against} if against else {}) | ({"of": of, "window": 3} if of else {})
    for kind, amount in {"above": 0.5, "below": 0.5, "rises": 0.1, "falls": 0.1, "flat": 0.1}.items()
    for against in (None, "start", "average", "best")
    for of in (None, "mean", "std", "start")
] + [{"not_finite": True}]


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_no_reading_makes_a_rule_crash_and_nan_alone_fires_none(rule: dict[str, Any]) -> None:
    odd = [NAN, INF, -INF, 0.0, -0.0, 1e308, -1e308, 1e200, 5e-324, 1.0]
    draw = random.Random(0)
    some = guard(**rule)
    for _ in range(300):
        some({METRIC: draw.choice(odd)})
    assert fired(guard(**rule), [NAN] * 20) == (list(range(20)) if "not_finite" in rule else [])


@pytest.mark.parametrize("against", ["start", "best"])
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_what_is_not_finite_is_no_baseline(odd: float, against: str) -> None:
    for rule in ({"falls": 0.5}, {"rises": 0.5}, {"above": 1.5}, {"below": 0.5}):
        some, same = guard(**rule, against=against), guard(**rule, against=against)
        readings = [1.0, 1.2, 0.3, 2.0, 1.0, 0.9]
        assert not [i for i in fired(some, [odd]) if math.isnan(odd)]
        assert fired(some, [*readings[:1], odd, *readings[1:]])[-1:] == [
            i + 1 for i in fired(same, readings)[-1:]
        ]
        assert some.watch.readings.first == same.watch.readings.first == 1.0
        assert some.watch.readings.best == same.watch.readings.best


def test_an_average_leaves_out_what_is_not_finite() -> None:
    rule = guard(above=2, against="average", window=2)
    assert fired(rule, [1, 1, NAN, 9, 9, 50]) == [5]  # with NaN in the window there is no average yet


def test_a_flat_row_with_a_nan_is_not_flat() -> None:
    for place in range(3):
        readings = [1.0, 1.0, 1.0]
        readings[place] = NAN
        assert fired(guard(flat=1.0, window=3), readings) == []


def test_a_spread_of_large_numbers_is_large() -> None:
    assert fired(guard(above=1.0, of="std", window=2), [1e200, -1e200]) == [1]


# state


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


SOME = [
    {"above": 0.6, "for": 2},
    {"above": 0.6, "rest": 3},
    {"below": 0.8, "against": "best"},
    {"above": 1.2, "against": "average", "window": 4},
    {"falls": 0.3, "against": "start"},
    {"flat": 0.5, "window": 3},
    {"above": 0.2, "of": "std", "window": 3},
    {"above": 0.5, "of": "start"},
    {"not_finite": True},
    {"above": 0.4, "when": [{"metric": "val/score", "falls": 0.2, "against": "best"}]},
]


def drawn(count: int, seed: int) -> list[dict[str, float]]:
    """Readings of both metrics, some missing, some NaN."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        value = NAN if draw.random() < 0.15 else draw.random()
        metrics = {METRIC: value, "val/score": draw.random(), "actor/loss": 1.0}
        found.append({name: x for name, x in metrics.items() if draw.random() < 0.8})
    return found


@pytest.mark.parametrize("rule", SOME, ids=str)
def test_a_rule_restored_at_any_reading_gives_the_same_verdicts(rule: dict[str, Any]) -> None:
    metrics = drawn(40, 1)
    straight = guard(**rule)
    expected, states = [], []
    for reading in metrics:
        states.append(through_json(straight.state()))
        expected.append(straight(reading))
    assert sum(verdict is not None for verdict in expected) > 1
    for begin in range(0, 40, 3):
        other = guard(**rule)
        for reading in drawn(7, 2):  # what it read elsewhere is forgotten
            other(reading)
        other.restore(states[begin])
        assert json.dumps(other.state()) == json.dumps(states[begin])
        assert list(map(repr, map(other, metrics[begin:]))) == list(map(repr, expected[begin:]))


def test_a_rule_whose_limit_was_changed_goes_on_from_what_it_had_read() -> None:
    rule, other = guard(above=2, against="start"), guard(above=3, against="start")
    fired(rule, [1.0, 1.5])
    other.restore(through_json(rule.state()))
    assert fired(other, [2.5, 3.5]) == [1]


@pytest.mark.parametrize(
    "changed",
    [
        {"metric": "probe/entropy", "falls": 0.1},
        {"rises": 0.1},
        {"falls": 0.1, "when": {"metric": "val/score", "above": 0}},
    ],
    ids=["metric", "kind", "another condition"],
)
def test_a_rule_whose_test_was_changed_has_read_nothing(changed: dict[str, Any]) -> None:
    rule, other = guard(falls=0.1), guard(**changed)
    fired(rule, [1.0, 2.0])
    other.restore(through_json(rule.state()))
    assert other.state() == guard(**changed).state()


# the guard of what is not finite


FINE = {"actor/loss": 0.3, "actor/grad_norm": 1e6}
BAD = {"actor/grad_norm": NAN}


def said(found: Verdict | None) -> Action:
    return Action.CONTINUE if found is None else found.action


@pytest.mark.parametrize("name", ["actor/loss", "actor/kl_loss", "critic/vf_loss", "actor/grad_norm"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_loss_or_gradient_that_is_not_finite_skips_the_update_and_is_named(name: str, value: float) -> None:
    found = NotFinite(10)(FINE | {name: value})
    assert found is not None
    assert (found.action, found.reason, found.metric) == (Action.SKIP, f"{name} is {value}", name)
    assert repr(found.value) == repr(value)


def test_finite_numbers_however_large_go_on() -> None:
    assert NotFinite(1)(FINE | {"critic/vf_loss": 1e30}) is None


def test_other_metrics_may_be_nan() -> None:
    """A statistic of one row has no spread; that says nothing of the update."""
    assert NotFinite(1)(FINE | {"critic/vf_explained_var": NAN}) is None


def test_after_so_many_in_a_row_the_run_stops_and_says_what_to_do() -> None:
    rule = NotFinite(3)
    assert [said(rule(BAD)) for _ in range(2)] == [Action.SKIP] * 2
    found = rule(BAD)
    assert found is not None
    assert found.action is Action.STOP
    assert found.reason == (
        "actor/grad_norm is nan, 3 updates in a row; lower the learning rate or check the rewards"
    )


def test_a_good_update_starts_the_count_anew() -> None:
    rule = NotFinite(2)
    for _ in range(5):
        assert said(rule(BAD)) is Action.SKIP
        assert rule(FINE) is None


def test_the_roles_are_counted_apart() -> None:
    """A critic that is fine between does not hide an actor that never is."""
    rule = NotFinite(2)
    assert said(rule(BAD)) is Action.SKIP
    assert rule({"critic/grad_norm": 1.0, "critic/vf_loss": 0.5}) is None
    assert said(rule({"critic/grad_norm": NAN})) is Action.SKIP
    assert said(rule(BAD)) is Action.STOP


def test_a_probe_between_two_bad_updates_changes_no_count() -> None:
    rule = NotFinite(2)
    assert said(rule(BAD)) is Action.SKIP
    assert rule({"probe/kl_reference": 0.1, "val/score": NAN}) is None
    assert said(rule(BAD)) is Action.STOP


def test_the_counts_go_on_from_their_state() -> None:
    rule, other = NotFinite(3), NotFinite(3)
    for metrics in (BAD, {"critic/vf_loss": INF}, BAD):
        rule(metrics)
    other.restore(through_json(rule.state()))
    for metrics in itertools.islice(itertools.cycle([{"critic/vf_loss": INF}, FINE, BAD]), 6):
        assert repr(rule(metrics)) == repr(other(metrics))
