"""A batch is made of what the models and the formulas say, in the rows' order, whatever the cut."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_made import Row, own_log_probs, random_trajectories
from training_made import IMITATION, experience_of, models, moved, recipe, references

from rein.data.cache import ScoreCache
from rein.errors import DataError
from rein.experience import ExperienceMaker, Passes, in_micro_batches, padded, value_metrics
from rein.functional.advantages import ESTIMATORS, gae
from rein.functional.kl import off_policy_kl
from rein.functional.masked import whiten
from rein.functional.rewards import place_on_last_token
from rein.models.actor import load_actor
from rein.models.reference import Reference
from rein.stages.train_frozen import reference_log_probs
from rein.types import Trajectory

ROWS = random_trajectories(10, holes=True, temperatures=(1.0, 0.6))


def test_padding_is_on_the_right_and_zero() -> None:
    found = padded([np.array([1, 2]), np.array([3]), np.array([], dtype=np.int64)], torch.float32)
    assert found.tolist() == [[1, 2], [3, 0], [0, 0]]


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_answers_come_back_in_the_rows_order_whatever_the_budget(budget: int) -> None:
    sizes = []

    def compute(part, temperature):  # type: ignore[no-untyped-def]
        sizes.append(len(part))
        assert temperature.tolist() == [row.temperature for row in part]
        assert not torch.is_grad_enabled()
        return padded([row.response_ids for row in part], torch.float64)

    found = in_micro_batches(ROWS, budget, compute)
    assert torch.equal(found, padded([row.response_ids for row in ROWS], torch.float64))
    assert sum(sizes) == len(ROWS)
    assert (len(sizes) == 1) == (budget == 10_000)


def test_old_log_probs_are_the_actor_s_own_at_each_row_s_temperature(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    e = experience_of(recipe(), actor, critic, ROWS)
    assert not e.old_log_probs.requires_grad
    for i, row in enumerate(ROWS):
        own = own_log_probs(actor.model, Row(row.prompt_ids, row.response_ids), row.temperature)
        torch.testing.assert_close(e.old_log_probs[i, : len(own)], own.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [1, 30])
def test_the_token_budget_changes_nothing(budget: int, tiny_lm: str) -> None:
    actor, critic = models(tiny_lm, "float64")
    whole = experience_of(recipe(), actor, critic, ROWS)
    cut = experience_of(recipe(actor={"ppo_max_token_len_per_gpu": budget}), actor, critic, ROWS)
    for name in ("old_log_probs", "values", "advantages", "returns", "rollout_is_weights"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), atol=1e-9, rtol=1e-9)
    assert cut.metrics == pytest.approx(whole.metrics, rel=1e-9)


def test_advantages_are_whitened_gae_of_the_placed_scores(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    e = experience_of(recipe(algorithm={"gamma": 0.9, "lam": 0.8}), actor, critic, ROWS)
    with torch.no_grad():
        values = critic.values(ROWS)
    assert e.values is not None
    torch.testing.assert_close(e.values, values, atol=1e-6, rtol=0)
    scores = place_on_last_token(torch.tensor([row.score or 0.0 for row in ROWS]), e.response_mask)
    expected, returns = gae(scores, values, e.response_mask, torch.zeros(10), gamma=0.9, lam=0.8)
    assert e.returns is not None
    torch.testing.assert_close(e.returns, returns, atol=1e-5, rtol=0)
    torch.testing.assert_close(e.advantages, whiten(expected, e.response_mask), atol=1e-4, rtol=0)
    assert not e.advantages[~e.response_mask].any()


def test_a_scored_row_is_terminal_however_it_ended(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    ends = [[dataclasses.replace(row, finish_reason=how) for row in ROWS] for how in ("stop", "length")]
    one, other = (experience_of(recipe(), actor, critic, rows) for rows in ends)
    assert torch.equal(one.advantages, other.advantages)


def test_scores_are_clipped_before_they_are_placed(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    rows = [row.with_score(score) for row, score in zip(ROWS, [-9.0, 9.0, 0.5] * 4, strict=False)]
    e = experience_of(recipe(reward_manager={"clip_range": [-2, 2]}), actor, critic, rows)
    assert e.metrics["critic/score/min"] == -2
    assert e.metrics["critic/score/max"] == 2
    assert e.metrics["critic/score/median"] == 0.5


def test_the_critic_is_fitted_to_the_same_shaped_scores_that_the_actor_learns_from(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    manager = {
        "normalize": "dataset",
        "clip_range": [-1, 1],
        "missing_eos_penalty": 0.5,
        "placement": "uniform",
    }
    some = recipe(reward_manager=manager, algorithm={"gamma": 1.0, "lam": 1.0})
    maker = ExperienceMaker(some, actor, critic, None, corrected=False, statistics=(0.25, 0.5))
    fitted, mask = maker.stored_returns(ROWS)
    e = maker.make(ROWS, 0.0)
    assert e.returns is not None
    torch.testing.assert_close(e.returns.where(mask, 0), fitted.where(mask, 0), atol=1e-5, rtol=0)
    expected = [min((row.score or 0.0) - 0.25, 0.5) / 0.5 - 0.5 for row in ROWS]
    first = mask.double().argmax(1, keepdim=True)
    assert fitted.gather(1, first)[:, 0].tolist() == pytest.approx(expected)  # nobody's answer ended
    assert e.metrics["critic/score/mean"] == pytest.approx(sum(expected) / len(expected))
    assert e.metrics["shaping/missing_eos"] == -0.5


def test_rewards_are_the_scores_less_the_kl(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    without = experience_of(recipe(), actor, critic, ROWS)
    some = recipe(algorithm={"use_kl_in_reward": True}, actor={"use_kl_loss": False})
    e = experience_of(some, actor, critic, ROWS, kl=0.5)
    assert e.ref_log_probs is not None
    paid = (0.5 * (e.old_log_probs - e.ref_log_probs)).where(e.response_mask, 0).sum(1)
    rewards = torch.tensor([row.score or 0.0 for row in ROWS]) - paid
    for which, value in {"mean": rewards.mean(), "max": rewards.max(), "min": rewards.min()}.items():
        assert e.metrics[f"critic/rewards/{which}"] == pytest.approx(value.item(), rel=1e-4)
        assert without.metrics[f"critic/rewards/{which}"] == without.metrics[f"critic/score/{which}"]


def test_kl_in_reward_is_taken_from_the_old_log_probs(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    some = recipe(
        algorithm={"use_kl_in_reward": True, "gamma": 1.0, "lam": 1.0}, actor={"use_kl_loss": False}
    )
    e = experience_of(some, actor, critic, ROWS, kl=0.5)
    off = experience_of(recipe(algorithm={"gamma": 1.0, "lam": 1.0}), actor, critic, ROWS)
    assert e.ref_log_probs is not None
    assert e.returns is not None
    assert off.returns is not None
    kl = (e.old_log_probs - e.ref_log_probs).where(e.response_mask, 0)
    after = kl.flip(1).cumsum(1).flip(1)  # what is still to be paid from each token on
    torch.testing.assert_close(
        e.returns, (off.returns - 0.5 * after).where(e.response_mask, 0), atol=1e-4, rtol=0
    )
    assert e.metrics["actor/reward_kl_penalty"] == pytest.approx(float(kl[e.response_mask].mean()), rel=1e-4)
    assert e.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert "actor/reward_kl_penalty" not in off.metrics


def test_weights_are_old_over_behavior_and_only_where_asked(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    e = experience_of(recipe(), actor, critic, ROWS)
    behavior = padded(
        [row.behavior_log_probs for row in ROWS if row.behavior_log_probs is not None], torch.float32
    )
    expected = (e.old_log_probs - behavior).exp().clamp(max=2.0).where(e.response_mask, 0)
    assert e.rollout_is_weights is not None
    torch.testing.assert_close(e.rollout_is_weights, expected)
    gap = float((e.old_log_probs - behavior).abs()[e.response_mask].max())
    assert e.metrics["training/log_prob_diff_max"] == pytest.approx(gap)
    off = experience_of(recipe(), actor, critic, ROWS, corrected=False)
    assert off.rollout_is_weights is None
    assert "rollout_corr/raw_ess" in off.metrics


def test_unknown_behavior_is_never_ratio_1(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    rows = [dataclasses.replace(ROWS[0], behavior_log_probs=None), *ROWS[1:]]
    e = experience_of(recipe(), actor, critic, rows)
    assert e.behavior_log_probs is None
    assert e.rollout_is_weights is None
    assert not any(name.startswith(("rollout_corr", "kl/")) for name in e.metrics)


def test_the_watched_kl_of_stored_tokens_is_logged_raw_and_capped(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    e = experience_of(recipe(), actor, critic, ROWS)
    assert e.ref_log_probs is not None
    assert e.behavior_log_probs is not None
    raw = off_policy_kl(e.old_log_probs, e.ref_log_probs, e.behavior_log_probs)[e.response_mask]
    assert e.metrics["kl/reference"] == pytest.approx(float(raw.mean()), rel=1e-5)
    assert e.metrics["kl/reference_capped"] == pytest.approx(float(raw.clamp(max=10).mean()), rel=1e-5)


def test_an_exact_kl_in_the_reward_is_the_one_over_the_vocabulary(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    start = Reference(actor)
    moved(actor.model, 1)
    algorithm = {"use_kl_in_reward": True, "kl_penalty": "full"}
    some = recipe(algorithm=algorithm, actor={"use_kl_loss": False, "ppo_max_token_len_per_gpu": 30})
    e = experience_of(some, actor, critic, ROWS, kl=0.5, start=start)
    with torch.no_grad():
        kl, _ = actor.exact_kl(ROWS, e.temperature, start.hidden(ROWS), start.logits)
    kl = kl.where(e.response_mask, 0)
    assert kl.max() > 0.1
    assert e.metrics["actor/reward_kl_penalty"] == pytest.approx(float(kl.sum() / e.response_mask.sum()))
    rewards = torch.tensor([row.score or 0.0 for row in ROWS]) - 0.5 * kl.sum(1)
    assert e.metrics["critic/rewards/mean"] == pytest.approx(rewards.mean().item(), rel=1e-5)


def test_nan_of_masked_behavior_tokens_changes_nothing(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    rows = []
    for row in ROWS:
        assert row.behavior_log_probs is not None
        log_probs = np.where(row.response_mask, row.behavior_log_probs, np.nan).astype(np.float32)
        rows.append(dataclasses.replace(row, behavior_log_probs=log_probs))
    clean, dirty = (experience_of(recipe(), actor, critic, some) for some in (ROWS, rows))
    assert clean.rollout_is_weights is not None
    assert dirty.rollout_is_weights is not None
    assert torch.equal(clean.rollout_is_weights, dirty.rollout_is_weights)
    assert clean.metrics == dirty.metrics


def test_an_actor_that_says_nan_is_an_error_that_names_the_row(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    with torch.no_grad():
        actor.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(DataError, match="made row 0: the actor gives this row a log-prob that is not finite"):
        experience_of(recipe(), actor, critic, ROWS)


def test_what_the_critic_is_fitted_to_are_the_discounted_stored_scores(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    maker = ExperienceMaker(recipe(algorithm={"gamma": 0.5}), actor, critic, None, corrected=False)
    rows = [
        dataclasses.replace(row, response_mask=np.ones_like(row.response_mask)).with_score(2.0)
        for row in ROWS
    ]
    returns, mask = maker.stored_returns(rows)
    for i, row in enumerate(rows):
        length = len(row.response_ids)
        assert returns[i, :length].tolist() == [2 * 0.5 ** (length - 1 - t) for t in range(length)]
    assert mask.sum() == sum(len(row.response_ids) for row in rows)


def test_explained_variance_is_1_for_the_returns_themselves_and_0_for_their_mean() -> None:
    returns = torch.tensor([[1.0, 3.0, 99.0]])
    mask = torch.tensor([[True, True, False]])
    assert value_metrics(returns, returns, mask)["critic/vf_explained_var"] == pytest.approx(1)
    flat = value_metrics(torch.full((1, 3), 2.0), returns, mask)
    assert flat["critic/vf_explained_var"] == pytest.approx(0, abs=1e-4)
    assert flat["critic/values/mean"] == flat["critic/returns/mean"] == 2


def test_the_reference_is_asked_once_for_each_row_and_never_again(tiny_lm: str, tmp_path: Path) -> None:
    reference = load_actor(tiny_lm)
    asked: list[int] = []
    hook = reference.model.model.embed_tokens.register_forward_hook(lambda m, given, out: asked.append(1))
    told: list[int] = []
    rows = [*ROWS[:6], ROWS[0]]  # one row stands there twice
    first = reference_log_probs(
        rows, Passes(reference, None), ScoreCache(tmp_path, "ref", {"weights": "1"}), 10_000, told.append
    )
    assert (len(asked), told) == (1, [6])
    again = reference_log_probs(
        ROWS, Passes(reference, None), ScoreCache(tmp_path, "ref", {"weights": "1"}), 10_000, told.append
    )
    assert (len(asked), told) == (2, [6, 4])
    other = reference_log_probs(
        ROWS[:2], Passes(reference, None), ScoreCache(tmp_path, "ref", {"weights": "2"}), 10_000, told.append
    )
    assert len(asked) == 3
    hook.remove()
    for row in ROWS:
        own = own_log_probs(reference.model, Row(row.prompt_ids, row.response_ids), row.temperature)
        torch.testing.assert_close(torch.tensor(again[row.key]), own.detach(), atol=1e-5, rtol=0)
        assert again[row.key].dtype == np.float32
    assert all(np.array_equal(first[row.key], again[row.key]) for row in rows)
    assert set(other) == {row.key for row in ROWS[:2]}


def test_the_reference_stays_when_the_actor_moves(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm)
    before = experience_of(recipe(), actor, critic, ROWS)
    moved(actor.model, 1)
    after = experience_of(recipe(), actor, critic, ROWS)
    refs = padded([references(ROWS)[row.key] for row in ROWS], torch.float32)
    assert before.ref_log_probs is not None
    assert after.ref_log_probs is not None
    assert torch.equal(before.ref_log_probs, refs)
    assert torch.equal(after.ref_log_probs, refs)
    assert not torch.equal(before.old_log_probs, after.old_log_probs)


def test_a_method_without_a_critic_needs_no_values(tiny_lm: str) -> None:
    actor, _ = models(tiny_lm)
    e = experience_of(recipe(**IMITATION), actor, None, ROWS, reference=False, corrected=False)
    assert e.values is None
    assert e.returns is None
    assert not e.advantages.any()


def left_out(row: Trajectory) -> Trajectory:
    """As guards leave a row out: it stays, and nothing of it counts."""
    return dataclasses.replace(row, response_mask=np.zeros_like(row.response_mask))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_row_of_which_nothing_counts_is_no_measure_for_the_others(estimator: str, tiny_lm: str) -> None:
    """Whatever it scored: not for its prompt's other rows, not for the whitening of the batch."""
    rows = [
        dataclasses.replace(row, group=f"prompt {i // 3}", baseline_score=0.5)
        for i, row in enumerate(random_trajectories(9))
    ]
    found = []
    for score in (0.0, 100.0):
        some = [left_out(row).with_score(score) if i in (1, 5) else row for i, row in enumerate(rows)]
        e = experience_of(recipe(9, algorithm={"adv_estimator": estimator}), *models(tiny_lm), some)
        assert not e.advantages[[1, 5]].any()
        found.append(e.advantages)
    assert torch.equal(*found)
    trio = [rows[3], rows[4]]  # the prompt whose third row is left out, by themselves
    if estimator in ("grpo", "rloo", "opo", "win_rate"):
        alone = experience_of(recipe(2, algorithm={"adv_estimator": estimator}), *models(tiny_lm), trio)
        width = alone.advantages.shape[1]
        torch.testing.assert_close(found[0][3:5, :width], alone.advantages)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_of_which_nothing_counts_has_numbers_all_the_same(estimator: str, tiny_lm: str) -> None:
    rows = [
        left_out(dataclasses.replace(row, group="prompt", baseline_score=0.5))
        for row in random_trajectories(4)
    ]
    e = experience_of(recipe(4, algorithm={"adv_estimator": estimator}), *models(tiny_lm), rows)
    assert not e.advantages.any()
    assert all(math.isfinite(value) for value in e.metrics.values())
