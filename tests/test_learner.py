"""Gradients are those of the formula on rows one by one; cuts, packing and masked numbers change nothing."""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import Row, own_log_probs, random_trajectories
from torch import Tensor
from training_made import IMITATION, ROWS, experience_of, gradients, learner_of, models, moved, recipe

from rein.config.methods import LOSSES as NEEDS
from rein.data.batches import chunks
from rein.functional.kl import kl_penalty
from rein.functional.losses.aggregate import MODES
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.functional.losses.table import LOSSES
from rein.guards.decide import decide
from rein.guards.rules import NotFinite
from rein.learner import Learner, objectives, optimizer_steps
from rein.models.load import trunk_of
from rein.models.reference import Reference
from rein.types import Action, Experience, Trajectory, Update

MIXED = random_trajectories(ROWS, holes=True, temperatures=(1.0, 0.6, 1.5))
ALL = tuple(range(ROWS))
TOLERANCE: dict[str, dict[str, float]] = {
    "float64": {"atol": 1e-9, "rtol": 1e-9},
    "float32": {"atol": 1e-6, "rtol": 1e-4},
}


def made(
    path: str, dtype: str = "float64", rows: list[Trajectory] = MIXED, **sections: dict[str, Any]
) -> tuple[Learner, Experience]:
    """A learner some steps away from the policy that the experience was made with."""
    some = recipe(len(rows), **sections)
    actor, critic = models(path, dtype)
    start = Reference(actor)
    experience = experience_of(some, actor, critic, rows)
    moved(actor.model, 1)
    moved(critic.model, 2)
    return learner_of(some, actor, critic, start=start), experience


def backward(learner: Learner, role: str, experience: Experience, rows: tuple[int, ...] = ALL) -> Any:
    metrics = learner.backward(Update(role, rows, 0), experience)
    model = learner.actor.model if role == "actor" else learner.critic.model  # type: ignore[union-attr]
    return gradients(model), metrics


def with_cut(learner: Learner, **actor: Any) -> Learner:
    """The same learner, its mini-batch cut in another way."""
    other = copy.copy(learner)
    other.recipe = learner.recipe.model_copy(update={"actor": learner.recipe.actor.model_copy(update=actor)})
    other.objectives = objectives(other.recipe, learner.actor, learner.critic, learner.reference)
    return other


CUTS: list[dict[str, Any]] = [
    {"ppo_max_token_len_per_gpu": 1},
    {"ppo_max_token_len_per_gpu": 23},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size": 1},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size": 5},
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("role", "mode", "kind"),
    [
        ("critic", "token-mean", "k3_soft"),
        ("actor", "token-mean", "full"),
        ("actor", "token-mean", "off_policy"),
        *(("actor", mode, "k3_soft") for mode in MODES),
    ],
)
def test_the_cut_into_micro_batches_changes_neither_gradients_nor_metrics(
    dtype: str, role: str, mode: str, kind: str, tiny_lm: str
) -> None:
    actor = {"loss_agg_mode": mode, "entropy_coeff": 0.01, "kl_loss_type": kind}
    learner, experience = made(tiny_lm, dtype, actor=actor)
    whole, said = backward(learner, role, experience)
    assert any(gradient.abs().max() > 1e-3 for gradient in whole)
    for cut in CUTS:
        parts, also = backward(with_cut(learner, **cut), role, experience)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE[dtype])
        assert also == pytest.approx(said, rel=TOLERANCE[dtype]["rtol"], abs=1e-7)


def own_exact_kl(learner: Learner, some: Row, temperature: float) -> Tensor:
    """KL(actor || start policy) over the vocabulary at each response token, by two plain forward passes."""
    assert isinstance(learner.reference, Reference)
    ids = torch.from_numpy(np.concatenate([some.prompt_ids, some.response_ids]))[None]
    log_p, log_q = (
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(some.prompt_ids) - 1 : -1]
        for model in (learner.actor.model, learner.reference.actor.model)
    )
    log_p, log_q = ((logits / temperature).log_softmax(-1) for logits in (log_p, log_q))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def by_rows(learner: Learner, e: Experience, role: str) -> Tensor:
    """The loss of the formulas, each row through the model's own forward, without packing."""
    actor, total = learner.recipe.actor, torch.zeros((), dtype=torch.float64)
    for i, some in enumerate(e.rows):
        plain, mask = Row(some.prompt_ids, some.response_ids), torch.from_numpy(some.response_mask)
        cut = slice(0, len(some.response_ids))
        if role == "critic":
            assert learner.critic is not None
            assert e.returns is not None
            assert e.values is not None
            ids = torch.from_numpy(np.concatenate([some.prompt_ids, some.response_ids]))[None]
            states = trunk_of(learner.critic.model)(input_ids=ids, attention_mask=torch.ones_like(ids))
            begin = len(some.prompt_ids) - 1
            v = (states.last_hidden_state[0, begin:-1] @ learner.critic.model.score.weight.T)[:, 0]
            old, returns = e.values[i, cut], e.returns[i, cut]
            error = torch.maximum((v - returns) ** 2, (v.clamp(old - 0.2, old + 0.2) - returns) ** 2)
            total = total + (error / 2)[mask].sum()
            continue
        x = own_log_probs(learner.actor.model, plain, some.temperature)
        assert e.rollout_is_weights is not None
        assert e.ref_log_probs is not None
        a, ratio = e.advantages[i, cut], (x - e.old_log_probs[i, cut]).exp()
        loss = -torch.minimum(a * ratio, a * ratio.clamp(0.8, 1.2))
        loss = torch.where(a < 0, torch.minimum(loss, -3.0 * a), loss) * e.rollout_is_weights[i, cut]
        exact = own_exact_kl(learner, plain, some.temperature) if learner.reference is not None else None
        loss = loss + 0.05 * kl_penalty(
            x,
            e.ref_log_probs[i, cut],
            actor.kl_loss_type,
            exact=exact,
            behavior_log_probs=e.behavior_log_probs[i, cut],
        )
        total = total + loss[mask].sum()
    return total / e.response_mask.sum()


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("actor", "off_policy"),
        ("actor", "k3_soft"),
        ("actor", "full"),
        ("actor", "full+"),
        ("critic", "k3_soft"),
    ],
)
def test_gradients_are_those_of_the_formula_on_rows_one_by_one(role: str, kind: str, tiny_lm: str) -> None:
    learner, experience = made(tiny_lm, actor={"kl_loss_type": kind})
    found, metrics = backward(learner, role, experience)
    loss = by_rows(learner, experience, role)
    loss.backward()  # type: ignore[no-untyped-call]
    model = learner.actor.model if role == "actor" else learner.critic.model  # type: ignore[union-attr]
    # The model's norms are float32 in any precision, and own_exact_kl is a second pass through them.
    near = 1e-7 if kind == "full" else 1e-9
    for one, other in zip(found, gradients(model), strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=near)
    name = "actor/loss" if role == "actor" else "critic/vf_loss"
    assert metrics[name] == pytest.approx(loss.item(), rel=1e-9)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_nan_at_masked_positions_changes_nothing(role: str, tiny_lm: str) -> None:
    learner, experience = made(tiny_lm, actor={"entropy_coeff": 0.01})
    clean, said = backward(learner, role, experience)
    spoiled = dataclasses.replace(experience)
    masked = ~experience.response_mask
    assert masked.any()
    for field in ("old_log_probs", "advantages", "ref_log_probs", "rollout_is_weights", "values", "returns"):
        tensor = getattr(experience, field).clone()
        tensor[masked] = math.nan
        setattr(spoiled, field, tensor)
    dirty, also = backward(learner, role, spoiled)
    assert all(torch.equal(one, other) for one, other in zip(clean, dirty, strict=True))
    assert also == said


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_micro_batch_where_nothing_counts_adds_nothing(role: str, tiny_lm: str) -> None:
    nothing = dataclasses.replace(MIXED[0], response_mask=np.zeros_like(MIXED[0].response_mask))
    learner, experience = made(tiny_lm, rows=[*MIXED[1:], nothing])
    alone = with_cut(learner, ppo_max_token_len_per_gpu=1)
    without, said = backward(alone, role, experience, ALL[:-1])
    found, also = backward(alone, role, experience)
    assert all(torch.equal(one, other) for one, other in zip(without, found, strict=True))
    assert also == said
    only, metrics = backward(alone, role, experience, (ROWS - 1,))
    assert all(not gradient.any() for gradient in only)
    assert all(math.isfinite(value) for value in metrics.values())


def test_before_the_first_update_the_ratio_is_1_and_nothing_is_clipped(tiny_lm: str) -> None:
    some, (actor, critic) = recipe(), models(tiny_lm)
    experience = experience_of(some, actor, critic, MIXED)
    _, metrics = backward(learner_of(some, actor, critic), "actor", experience)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0


def test_the_actor_reads_the_temperature_and_the_critic_does_not(tiny_lm: str) -> None:
    learner, experience = made(tiny_lm)
    actor, _ = backward(learner, "actor", experience)
    critic, _ = backward(learner, "critic", experience)
    hotter = dataclasses.replace(experience, temperature=2 * experience.temperature)
    other_actor, _ = backward(learner, "actor", hotter)
    other_critic, _ = backward(learner, "critic", hotter)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(actor, other_actor, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(critic, other_critic, strict=True))


def mean_entropy(learner: Learner, e: Experience) -> float:
    with torch.no_grad():
        _, entropy = learner.actor.log_probs(e.rows, e.temperature, entropy=True)
    assert entropy is not None
    return float(entropy[e.response_mask].mean())


@pytest.mark.parametrize(("coefficient", "sign"), [(0.5, 1), (-0.5, -1)])
def test_the_entropy_bonus_raises_entropy(coefficient: float, sign: int, tiny_lm: str) -> None:
    learner, e = made(tiny_lm, actor={"entropy_coeff": coefficient, "use_kl_loss": False})
    e = dataclasses.replace(e, advantages=torch.zeros_like(e.advantages))
    before = mean_entropy(learner, e)
    metrics = learner.backward(Update("actor", ALL, 0), e)
    assert metrics["actor/entropy"] == pytest.approx(before, rel=1e-6)
    learner.apply("actor")
    assert sign * (mean_entropy(learner, e) - before) > 1e-3


def test_updates_make_the_good_tokens_likelier_and_pull_toward_the_reference(tiny_lm: str) -> None:
    some, (actor, critic) = recipe(actor={"use_kl_loss": False}), models(tiny_lm)
    e = experience_of(some, actor, critic, MIXED)
    learner = learner_of(some, actor, critic)
    learner.backward(Update("actor", ALL, 0), e)
    learner.apply("actor")
    with torch.no_grad():
        after, _ = actor.log_probs(e.rows, e.temperature)
    assert ((after - e.old_log_probs) * e.advantages)[e.response_mask].sum() > 0
    assert e.ref_log_probs is not None
    pulled = learner_of(recipe(actor={"kl_loss_type": "k3_soft"}), actor, critic, kl=1.0)
    e = dataclasses.replace(e, advantages=torch.zeros_like(e.advantages), old_log_probs=after)
    before = kl_penalty(after, e.ref_log_probs, "k3_soft")[e.response_mask].mean()
    metrics = pulled.backward(Update("actor", ALL, 0), e)
    assert metrics["actor/kl_loss"] == pytest.approx(float(before), rel=1e-5)
    assert metrics["actor/kl_coef"] == 1.0
    pulled.apply("actor")
    with torch.no_grad():
        later, _ = actor.log_probs(e.rows, e.temperature)
    assert kl_penalty(later, e.ref_log_probs, "k3_soft")[e.response_mask].mean() < before


def test_a_kl_coefficient_of_zero_is_no_pull(tiny_lm: str) -> None:
    learner, e = made(tiny_lm)
    learner.kl_coef_in_loss = 0.0
    found, metrics = backward(learner, "actor", e)
    off, said = backward(with_cut(learner, use_kl_loss=False), "actor", e)
    assert all(torch.equal(one, other) for one, other in zip(found, off, strict=True))
    assert metrics["actor/kl_loss"] > 0
    assert "actor/kl_loss" not in said


def test_cloning_raises_the_likelihood_of_its_rows_and_needs_no_critic(tiny_lm: str) -> None:
    some, (actor, _) = recipe(**IMITATION), models(tiny_lm, "float64")
    e = experience_of(some, actor, None, MIXED, reference=False, corrected=False)
    learner = learner_of(some, actor, None)
    assert {update.role for update in learner.updates(ROWS, 0)} == {"actor"}
    found, metrics = backward(learner, "actor", e)
    total = torch.zeros((), dtype=torch.float64)
    for some_row in MIXED:
        plain = Row(some_row.prompt_ids, some_row.response_ids)
        said = own_log_probs(actor.model, plain, some_row.temperature)
        total = total - said[torch.from_numpy(some_row.response_mask)].sum()
    nll = total / e.response_mask.sum()
    nll.backward()  # type: ignore[no-untyped-call]
    assert metrics["actor/loss"] == pytest.approx(nll.item())
    for one, other in zip(found, gradients(actor.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_the_recipe_s_losses_are_those_of_the_tables() -> None:
    assert set(NEEDS) == set(LOSSES) | set(PAIR_LOSSES)
    for name, loss in LOSSES.items():
        assert (loss.against != "old") == (loss.against in NEEDS[name]), name


# the plan


def test_each_row_is_in_one_mini_batch_of_each_epoch_of_each_role(tiny_lm: str) -> None:
    some = recipe(
        actor={"ppo_mini_batch_size": 5, "ppo_epochs": 2},
        critic={"ppo_mini_batch_size": 4, "ppo_epochs": 3},
    )
    learner = learner_of(some, *models(tiny_lm))
    plan = learner.updates(ROWS, 0)
    assert [update.number for update in plan] == list(range(len(plan)))
    assert [update.role for update in plan] == ["critic"] * 9 + ["actor"] * 6
    for role, size, epochs in (("critic", 3, 3), ("actor", 3, 2)):
        own = [update.rows for update in plan if update.role == role]
        for epoch in chunks(own, size):
            assert sorted(row for rows in epoch for row in rows) == list(ALL)
        assert len(set(own)) == size * epochs  # another order in each epoch


def test_the_plan_follows_from_seed_and_batch_alone(tiny_lm: str) -> None:
    learner = learner_of(recipe(actor={"ppo_mini_batch_size": 5}), *models(tiny_lm))
    assert learner.updates(ROWS, 3) == learner.updates(ROWS, 3)
    assert learner.updates(ROWS, 3) != learner.updates(ROWS, 4)
    still = with_cut(learner, shuffle=False)
    assert [u.rows for u in still.updates(5, 0)] == [tuple(range(5))] * len(still.updates(5, 0))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_12_rows_in_batches_of_4_mini_batches_of_2_and_2_epochs_are_12_steps_that_end_at_the_floor(
    role: str, tiny_lm: str
) -> None:
    schedule = {"lr": 1e-2, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}
    some = recipe(
        data={"train_batch_size": 4},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2, "optim": schedule},
        critic={"optim": schedule},
    )
    assert optimizer_steps(some, role, {4: 3}) == 12
    actor, critic = models(tiny_lm)
    learner, rates = learner_of(some, actor, critic, steps=12), []
    for batch in range(3):
        e = experience_of(some, actor, critic, MIXED[4 * batch : 4 * batch + 4])
        for update in learner.updates(4, batch):
            if update.role == role:
                rates.append(learner.backward(update, e)[f"{role}/lr"])
                learner.apply(role)
    assert len(rates) == 12
    assert rates[0] == 1e-2
    assert rates[-1] == pytest.approx(1e-3)
    assert min(rates[:-1]) > rates[-1]


def test_a_short_last_mini_batch_is_a_step_and_roles_are_counted_apart() -> None:
    some = recipe(
        data={"train_batch_size": 128},
        actor={"ppo_mini_batch_size": 50, "ppo_epochs": 2},
        critic={"ppo_mini_batch_size": 128, "ppo_epochs": 1},
    )
    sizes = {128: 7, 104: 1}
    assert optimizer_steps(some, "actor", sizes) == 8 * 3 * 2
    assert optimizer_steps(some, "critic", sizes) == 8


# applied, discarded, restored


def weights(learner: Learner) -> list[Tensor]:
    assert learner.critic is not None
    return [p.detach().clone() for m in (learner.actor.model, learner.critic.model) for p in m.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_backward_leaves_the_weights_alone_and_apply_moves_one_role(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, "float32")
    before = weights(learner)
    for role in ("actor", "critic"):
        learner.backward(Update(role, ALL, 0), e)
    assert equal(weights(learner), before)
    learner.discard("critic")
    learner.apply("actor")
    actors = len(list(learner.actor.model.parameters()))
    after = weights(learner)
    assert not equal(after[:actors], before[:actors])
    assert equal(after[actors:], before[actors:])


@pytest.mark.parametrize("where", ["weight", "advantage"])
def test_an_update_with_a_nan_is_skipped_with_weights_bit_equal_and_the_run_stops_after_three(
    where: str, tiny_lm: str
) -> None:
    learner, e = made(tiny_lm, "float32")
    assert e.rollout_is_weights is not None
    (e.rollout_is_weights if where == "weight" else e.advantages)[0, 0] = math.nan
    e.response_mask[0, 0] = True
    guard, before = [NotFinite(3)], weights(learner)
    actions = []
    for _ in range(3):
        metrics = learner.backward(Update("actor", ALL, 0), e)
        actions += [verdict.action for verdict in decide(guard, metrics)]
        learner.discard("actor")
    assert actions == [Action.SKIP, Action.SKIP, Action.STOP]
    assert equal(weights(learner), before)
    assert learner.optimizers["actor"].step == 3


def test_the_adaptive_coefficients_follow_the_probe_and_fixed_ones_stay(tiny_lm: str) -> None:
    control = {"type": "adaptive", "target_kl": 6.0, "horizon": 10000}
    actor, critic = models(tiny_lm)
    learner = learner_of(recipe(algorithm={"kl_ctrl": control}), actor, critic, kl=0.1)
    learner.control_kl(12.0, 256, 0.1)
    assert learner.kl_coef_in_loss == learner.kl_coef_in_reward == pytest.approx(0.100512)
    fixed = learner_of(recipe(), actor, critic, kl=0.1)
    fixed.control_kl(12.0, 256, 0.1)
    assert fixed.kl_coef_in_loss == fixed.kl_coef_in_reward == 0.1


def test_the_moving_average_follows_what_the_probe_said_before(tiny_lm: str) -> None:
    """Target .1, horizon 4, batches of 2 rows: the average keeps (3 / 4)^2 of itself with each."""
    control = {"type": "moving_average", "target_kl": 0.1, "horizon": 4}
    learner = learner_of(recipe(algorithm={"kl_ctrl": control}), *models(tiny_lm), kl=0.1)
    learner.control_kl(math.nan, 2, 0.1)
    assert (learner.kl_average, learner.kl_coef_in_loss) == (None, 0.1)
    learner.control_kl(0.4, 2, 0.2)
    assert learner.kl_coef_in_loss == pytest.approx(0.1 * 1.1)  # 1 + .2 * 2 / 4
    learner.control_kl(0.0, 2, 0.3)
    kept = (1 - 1 / 4) ** 2
    assert learner.kl_average == pytest.approx(0.4 * kept)
    assert learner.kl_coef_in_loss == pytest.approx(0.1 * 1.1**2)  # the average still is over the target
    for said in (math.nan, math.inf):
        learner.control_kl(said, 2, 0.4)
        assert learner.kl_average == pytest.approx(0.4 * kept)
        assert learner.kl_coef_in_loss == learner.kl_coef_in_reward == pytest.approx(0.1 * 1.1**2)


@pytest.mark.parametrize(
    ("shape", "wanted"), [("pieces", [0.08, 0.05, 0.05, 0.06]), ("linear", [0.065, 0.05, 0.055, 0.06])]
)
@pytest.mark.parametrize("in_reward", [False, True])
def test_a_schedule_sets_the_coefficient_of_the_kl_that_is_on(
    shape: str, wanted: list[float], in_reward: bool, tiny_lm: str
) -> None:
    control = {"type": "schedule", "schedule": [[0, 0.08], [0.2, 0.05], [0.8, 0.06]], "shape": shape}
    some = recipe(
        algorithm={"kl_ctrl": control, "use_kl_in_reward": in_reward}, actor={"use_kl_loss": not in_reward}
    )
    learner = learner_of(some, *models(tiny_lm))
    found = []
    for progress in (0.1, 0.2, 0.5, 1.0):
        learner.control_kl(math.nan, ROWS, progress)
        coefs = (learner.kl_coef_in_loss, learner.kl_coef_in_reward)
        assert coefs[not in_reward] == 0
        found.append(coefs[in_reward])
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("controller", ["adaptive", "moving_average"])
def test_a_restored_learner_goes_on_bit_by_bit(controller: str, tiny_lm: str) -> None:
    some = recipe(actor={"ppo_mini_batch_size": 6}, algorithm={"kl_ctrl": {"type": controller}})
    actor, critic = models(tiny_lm)
    straight, e = learner_of(some, actor, critic), experience_of(some, actor, critic, MIXED)

    def go(learner: Learner, batch: int) -> None:
        for update in learner.updates(ROWS, batch):
            learner.backward(update, e)
            learner.apply(update.role)
        learner.control_kl(0.3, ROWS, 0.1)

    go(straight, 0)
    tensors, meta = straight.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed = learner_of(some, *models(tiny_lm))
    resumed.restore(tensors, meta)
    assert resumed.kl_coef_in_loss == straight.kl_coef_in_loss != 0.05
    assert resumed.kl_average == straight.kl_average
    for learner in (straight, resumed):
        go(learner, 1)
    assert equal(weights(straight), weights(resumed))
