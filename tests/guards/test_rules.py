"""What is not finite is skipped, and after too many in a row the run stops."""

import math

import pytest

from rein.guards.rules import NotFinite
from rein.types import Action

FINE = {"actor/loss": 0.3, "actor/grad_norm": 1e6}


@pytest.mark.parametrize("name", ["actor/loss", "actor/kl_loss", "critic/vf_loss", "actor/grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_or_gradient_that_is_not_finite_skips_the_update_and_is_named(name: str, value: float) -> None:
    verdict = NotFinite(10)(FINE | {name: value})
    assert verdict.action is Action.SKIP
    assert verdict.reason == f"{name} is {value}"


def test_finite_numbers_however_large_go_on() -> None:
    assert NotFinite(1)(FINE | {"critic/vf_loss": 1e30}).action is Action.CONTINUE


def test_other_metrics_may_be_nan() -> None:
    """A statistic of one row has no spread; that says nothing of the update."""
    assert NotFinite(1)(FINE | {"critic/vf_explained_var": math.nan}).action is Action.CONTINUE


def test_after_so_many_in_a_row_the_run_stops_and_says_what_to_do() -> None:
    rule = NotFinite(3)
    bad = {"actor/grad_norm": math.nan}
    assert [rule(bad).action for _ in range(2)] == [Action.SKIP] * 2
    verdict = rule(bad)
    assert verdict.action is Action.STOP
    assert verdict.reason == (
        "actor/grad_norm is nan, 3 updates in a row; lower the learning rate or check the rewards"
    )


def test_a_good_update_starts_the_count_anew() -> None:
    rule = NotFinite(2)
    bad = {"actor/grad_norm": math.nan}
    for _ in range(5):
        assert rule(bad).action is Action.SKIP
        assert rule(FINE).action is Action.CONTINUE


def test_the_roles_are_counted_apart() -> None:
    """A critic that is fine between does not hide an actor that never is."""
    rule = NotFinite(2)
    assert rule({"actor/grad_norm": math.nan}).action is Action.SKIP
    assert rule({"critic/grad_norm": 1.0, "critic/vf_loss": 0.5}).action is Action.CONTINUE
    assert rule({"critic/grad_norm": math.nan}).action is Action.SKIP
    assert rule({"actor/grad_norm": math.nan}).action is Action.STOP
