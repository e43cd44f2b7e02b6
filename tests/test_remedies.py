"""Each remedy moves what it names in a real learner and maker, stays within its bounds and goes back."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_made import random_trajectories
from training_made import ROWS, learner_of, models, recipe, references

from rein.config.guards import REMEDIES as NAMES
from rein.errors import ConfigError
from rein.experience import ExperienceMaker
from rein.functional.kl import kl_penalty
from rein.learner import Learner
from rein.remedies import BOUNDS, HIGH, LOW, REMEDIES, changed, relaxed, soften
from rein.types import Experience, Softening, Update

MIXED = random_trajectories(ROWS, holes=True)
ALL = tuple(range(ROWS))
AMOUNTS: dict[str, Any] = {  # one of each, as a rule would give it
    "lr": 0.5, "critic_lr": 0.25, "kl_coef": 1.5, "kl_coef_at": 0.3, "entropy_coeff": 0.01, "grad_clip": 0.5,
    "temperature": 0.8, "ppo_epochs": 1, "token_budget": 0.5, "reward_clip": [-1, 1], "exclude_rows": True,
}  # fmt: skip


def made(path: str, **sections: Any) -> tuple[Learner, ExperienceMaker]:
    """A learner and a maker on the same models, both KLs on."""
    both: dict[str, Any] = {
        "algorithm": {"use_kl_in_reward": True, "insist": True},
        "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 2, "kl_loss_type": "k3_soft"},
    }
    some = recipe(ROWS, **{key: both.get(key, {}) | sections.get(key, {}) for key in both | sections})
    actor, critic = models(path)
    maker = ExperienceMaker(some, actor, critic, references(MIXED), corrected=True)
    return learner_of(some, actor, critic), maker


def softened(path: str, *remedies: tuple[str, Any], **sections: Any) -> tuple[Learner, ExperienceMaker]:
    learner, maker = made(path, **sections)
    soft = soften(Softening(), remedies)
    learner.soften(soft)
    maker.soften(soft)
    return learner, maker


def one_actor_update(learner: Learner, e: Experience) -> dict[str, float]:
    metrics = learner.backward(Update("actor", ALL, 0), e)
    learner.apply("actor")
    return metrics


# the table


def test_a_recipe_may_name_the_remedies_of_the_table_and_no_others() -> None:
    assert list(NAMES) == list(REMEDIES) == list(AMOUNTS)
    assert {field.name for field in dataclasses.fields(Softening)} == set(REMEDIES) - {"exclude_rows"}
    assert {*LOW} | {*BOUNDS} | {"ppo_epochs", "reward_clip", "exclude_rows"} == set(REMEDIES)


@pytest.mark.parametrize("name", AMOUNTS)
def test_each_changes_the_setting_of_its_name_alone(name: str) -> None:
    found = changed(Softening(), soften(Softening(), [(name, AMOUNTS[name])]))
    assert list(found) == ([] if name == "exclude_rows" else [name])


def test_an_unknown_one_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="guards: 'kl_coeff' is no remedy; did you mean kl_coef"):
        soften(Softening(), [("lr", 0.5), ("kl_coeff", 2)])


def test_they_are_taken_in_order_and_the_start_is_left_as_it_was() -> None:
    start = Softening(lr=0.5)
    assert soften(start, [("lr", 0.5), ("kl_coef", 2), ("kl_coef", 1.5)]) == Softening(lr=0.25, kl_coef=3.0)
    assert start == Softening(lr=0.5)


# what each moves


@pytest.mark.parametrize(("role", "name"), [("actor", "lr"), ("critic", "critic_lr")])
def test_a_rate_is_scaled_for_its_role_and_its_step_is_as_much_smaller(
    role: str, name: str, tiny_lm: str
) -> None:
    moved = {}
    for factor in (None, 0.25):
        learner, maker = softened(
            tiny_lm, *([(name, factor)] if factor else []), actor={"use_kl_loss": False}
        )
        e = maker.make(MIXED, 0.0)
        parameter = learner.optimizers[role].parameters[1]
        before = parameter.detach().clone()
        metrics = learner.backward(Update(role, ALL, 0), e)
        learner.apply(role)
        moved[factor] = parameter.detach() - before
        assert metrics[f"{role}/lr"] == 1e-2 * (factor or 1)
        other = {"actor": "critic", "critic": "actor"}[role]
        assert learner.optimizers[other].lr == 1e-2
    assert moved[None].abs().max() > 1e-3
    torch.testing.assert_close(moved[0.25], 0.25 * moved[None], atol=1e-8, rtol=1e-3)


def test_the_rate_s_schedule_is_scaled_not_restarted(tiny_lm: str) -> None:
    schedule = {"lr": 1e-2, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
    plain, _ = made(tiny_lm, actor={"optim": schedule})
    learner, _ = softened(tiny_lm, ("lr", 0.5), actor={"optim": schedule})
    for _ in range(10):
        assert learner.optimizers["actor"].lr == pytest.approx(plain.optimizers["actor"].lr / 2)
        for some in (plain, learner):
            some.discard("actor")


@pytest.mark.parametrize(
    ("remedy", "expected"),
    [(("kl_coef", 3), 0.15), (("kl_coef_at", 0.3), 0.3)],
)  # fmt: skip
def test_a_kl_remedy_moves_the_coefficient_in_the_loss_and_in_the_reward(
    remedy: tuple[str, Any], expected: float, tiny_lm: str
) -> None:
    learner, maker = softened(tiny_lm, remedy)
    coef = learner.softened(learner.kl_coef_in_reward)
    assert coef == pytest.approx(expected)
    e = maker.make(MIXED, coef)
    plain = maker.make(MIXED, 0.0)
    kl = kl_penalty(e.old_log_probs, e.ref_log_probs, "k1")  # type: ignore[arg-type]
    taken = float((kl.where(e.response_mask, 0)).sum() / len(MIXED)) * expected
    assert e.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(expected)
    assert plain.metrics["critic/rewards/mean"] - e.metrics["critic/rewards/mean"] == pytest.approx(
        taken, rel=1e-4
    )
    metrics = learner.backward(Update("actor", ALL, 0), e)
    assert metrics["actor/kl_coef"] == pytest.approx(expected)
    both = metrics["actor/pg_loss"] + expected * metrics["actor/kl_loss"]
    assert metrics["actor/loss"] == pytest.approx(both, rel=1e-5)


def test_a_kl_that_is_off_stays_off(tiny_lm: str) -> None:
    learner, _ = softened(tiny_lm, ("kl_coef", 20), ("kl_coef_at", 1))
    assert learner.softened(0.0) == 0.0


def test_a_controller_goes_on_beneath_the_kl_remedy(tiny_lm: str) -> None:
    control = {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 100}}
    learner, _ = softened(tiny_lm, ("kl_coef", 2), algorithm=control)
    learner.control_kl(0.3, ROWS, 0.5)
    assert learner.kl_coef_in_loss == pytest.approx(0.05 * (1 + 0.2 * ROWS / 100))
    assert learner.softened(learner.kl_coef_in_loss) == pytest.approx(2 * learner.kl_coef_in_loss)


def test_an_entropy_bonus_comes_into_the_loss_and_goes_out_again(tiny_lm: str) -> None:
    learner, maker = softened(tiny_lm, ("entropy_coeff", 0.05))
    e = maker.make(MIXED, 0.05)
    metrics = learner.backward(Update("actor", ALL, 0), e)
    without = metrics["actor/pg_loss"] + metrics["actor/kl_coef"] * metrics["actor/kl_loss"]
    assert metrics["actor/loss"] == pytest.approx(without - 0.05 * metrics["actor/entropy"], rel=1e-5)
    learner.soften(Softening())
    assert "actor/entropy" not in learner.backward(Update("actor", ALL, 0), e)


@pytest.mark.parametrize("given", [0.01, -0.02])
def test_an_entropy_bonus_takes_the_place_of_the_recipe_s(given: float, tiny_lm: str) -> None:
    learner, maker = softened(tiny_lm, ("entropy_coeff", 0), actor={"entropy_coeff": given})
    e = maker.make(MIXED, 0.05)
    assert "actor/entropy" not in learner.backward(Update("actor", ALL, 0), e)
    learner.soften(Softening())
    assert learner.backward(Update("actor", ALL, 0), e)["actor/entropy"] > 0


def test_gradients_of_both_roles_are_clipped_tighter_never_looser(tiny_lm: str) -> None:
    learner, maker = softened(
        tiny_lm, ("grad_clip", 0.05), actor={"grad_clip": 0.2}, critic={"grad_clip": 0.01}
    )
    assert [learner.optimizers[role].grad_clip for role in ("actor", "critic")] == [0.05, 0.01]
    e = maker.make(MIXED, 0.05)
    assert one_actor_update(learner, e)["actor/grad_norm"] > 0.05
    optimizer = learner.optimizers["actor"]
    squares = [optimizer.adam.state[p]["exp_avg_sq"].sum() for p in optimizer.parameters]
    norm = math.sqrt(float(torch.stack(squares).sum()) / (1 - 0.999))  # of the one gradient it has seen
    assert norm == pytest.approx(0.05, rel=1e-3)
    learner.soften(soften(learner.soft, [("grad_clip", 0.4)]))
    assert learner.optimizers["actor"].grad_clip == 0.05


@pytest.mark.parametrize(("count", "expected"), [(1, 3), (2, 4), (-1, 1), (-4, 1)])
def test_ppo_epochs_are_added_to_the_actor_s_plan_alone(count: int, expected: int, tiny_lm: str) -> None:
    plain, _ = made(tiny_lm)
    learner, _ = softened(tiny_lm, ("ppo_epochs", count))
    plan, before = learner.updates(ROWS, 0), plain.updates(ROWS, 0)
    per_epoch = ROWS // 4
    assert [update.role for update in plan] == ["critic"] * 2 * per_epoch + ["actor"] * expected * per_epoch
    both = min(len(plan), len(before))
    assert plan[:both] == before[:both]  # so that a place in the plan stays what it was


def test_the_token_budget_cuts_both_roles_micro_batches_and_the_maker_s_and_changes_no_number(
    tiny_lm: str,
) -> None:
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in MIXED]
    given = {"ppo_max_token_len_per_gpu": sum(lengths)}
    plain, maker = made(tiny_lm, actor=given)
    learner, halved = softened(tiny_lm, ("token_budget", 0.5), ("token_budget", 0.5), actor=given)
    assert learner.token_budget == halved.token_budget == sum(lengths) // 4
    e, other = maker.make(MIXED, 0.05), halved.make(MIXED, 0.05)
    assert e.metrics == pytest.approx(other.metrics, rel=1e-4, abs=1e-6)
    for role in ("critic", "actor"):
        update = Update(role, ALL, 0)
        parts = learner._micro_batches(update, e)
        assert len(plain._micro_batches(update, e)) == 1
        assert len(parts) >= 4
        assert all(sum(lengths[i] for i in part) <= max(learner.token_budget, *lengths) for part in parts)
        assert learner.backward(update, e) == pytest.approx(plain.backward(update, e), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("own", "ends", "expected"),
    [
        (None, [-1, 1], (-1, 1)),
        ([-0.5, 2], [-1, 1], (-0.5, 1)),
        ([-2, 0.5], [-1, 1], (-1, 0.5)),
        ([-3, -2], [-1, 1], (-3, -2)),  # nothing is left in between: the recipe's stay
    ],
)
def test_rewards_are_clipped_to_what_the_recipe_and_the_remedy_allow(
    own: Any, ends: Any, expected: tuple[float, float], tiny_lm: str
) -> None:
    rows = [row.with_score(float(3 * (-1) ** i)) for i, row in enumerate(MIXED)]
    _, maker = softened(tiny_lm, ("reward_clip", ends), reward_manager={"clip_range": own})
    totals = maker.scores(rows).token_level_scores.sum(1)
    assert (float(totals.min()), float(totals.max())) == pytest.approx(expected)
    returns, mask = maker.stored_returns(rows)
    assert float(returns[mask].max()) == pytest.approx(expected[1])
    maker.soften(Softening())
    assert maker.reward_manager == maker.recipe.reward_manager


# bounds, and the way back


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("way", ["as given", "the other way"])
def test_a_hundred_repeats_stay_within_bounds(name: str, way: str) -> None:
    other: dict[str, Any] = {"ppo_epochs": -1, "kl_coef": 0.5}
    amount = AMOUNTS[name] if way == "as given" else other.get(name, AMOUNTS[name])
    if name in LOW and way != "as given" and name not in other:
        amount = 1 / amount
    soft = Softening()
    for _ in range(100):
        soft = soften(soft, [(name, amount)])
    value = getattr(soft, name, None)
    if name in LOW:
        assert LOW[name] <= value <= HIGH[name]
        assert value in (LOW[name], HIGH[name])
    elif name in BOUNDS:
        assert BOUNDS[name][0] <= value <= BOUNDS[name][1]
    elif name == "ppo_epochs":
        assert value == 4 * (1 if way == "as given" else -1)
    assert soften(soft, [(name, amount)]) == soft


def test_a_hundred_of_all_leave_a_learner_that_still_works(tiny_lm: str) -> None:
    soft = Softening()
    for _ in range(100):
        soft = soften(soft, list(AMOUNTS.items()))
    learner, maker = made(tiny_lm)
    learner.soften(soft)
    maker.soften(soft)
    e = maker.make(MIXED, learner.softened(0.05))
    plan = learner.updates(ROWS, 0)
    assert len(plan) == 3 * 2 + 3 * 6
    for update in (plan[0], plan[-1]):
        assert all(math.isfinite(value) for value in learner.backward(update, e).values())
        learner.apply(update.role)
    assert soften(soft, list(AMOUNTS.items())) == soft


@pytest.mark.parametrize("name", [name for name in AMOUNTS if name not in ("token_budget", "reward_clip")])
@pytest.mark.parametrize("repeats", [1, 100])
def test_what_was_softened_goes_back_to_the_recipe_s(name: str, repeats: int) -> None:
    soft, way = soften(Softening(), [(name, AMOUNTS[name])] * repeats), []
    while soft != Softening():
        soft, before = relaxed(soft), soft
        way.append(soft)
        assert soft != before
        assert len(way) < 10
        if name in LOW and soft != Softening():
            assert getattr(soft, name) == pytest.approx(math.sqrt(getattr(before, name)))
    assert relaxed(soft) == soft


def test_memory_and_rewards_do_not_come_back() -> None:
    soft = Softening(token_budget=0.25, reward_clip=(-1.0, 1.0))
    assert relaxed(soft) == soft


def test_settings_that_go_back_are_the_learner_s_own_again(tiny_lm: str) -> None:
    """Bit for bit: a learner that was softened for a while and one that never was."""
    (once, maker), (never, _) = softened(tiny_lm, *AMOUNTS.items()), made(tiny_lm)
    soft = once.soft
    while soft != (kept := dataclasses.replace(Softening(), token_budget=0.5, reward_clip=(-1.0, 1.0))):
        soft = relaxed(soft)
    assert kept == soft
    for some in (once, maker):
        some.soften(Softening())  # type: ignore[attr-defined]
    e = maker.make(MIXED, never.softened(0.05))
    ways: list[Callable[[Learner], Any]] = [
        lambda learner: [o.lr for o in learner.optimizers.values()],
        lambda learner: [o.grad_clip for o in learner.optimizers.values()],
        lambda learner: learner.updates(ROWS, 0),
        lambda learner: learner.softened(0.05),
        lambda learner: learner.token_budget,
        lambda learner: one_actor_update(learner, e),
    ]
    for way in ways:
        assert way(once) == way(never)
