"""Every loss of the table through the learner: cuts and ranks change nothing; each hears the recipe."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rows_made import random_trajectories
from torch import Tensor
from training_made import experience_of, gradients, learner_of, models, moved, recipe

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.functional.losses.m2po import m2po_mask
from rein.functional.losses.table import LOSSES
from rein.functional.off_policy import correct
from rein.learner import Learner, objectives
from rein.types import Experience, Trajectory, Update

N = 6
ROWS = [
    dataclasses.replace(row, group=f"prompt {i // 2}", score=float(i % 2 == 0))
    for i, row in enumerate(random_trajectories(N, holes=True, temperatures=(1.0, 0.7)))
]
CLOSE = {"atol": 1e-9, "rtol": 1e-9}
BYPASS = "algorithm.rollout_correction.preset=bypass_"
REJECTING = "algorithm.rollout_correction.preset=decoupled_k3_rs_token_tis"
RECIPES: dict[str, list[str]] = {
    **{
        name: [f"actor.policy_loss.loss_mode={name}", *["actor.policy_loss.dro_beta=0.1"] * (name == "dro")]
        for name in LOSSES
        if name != "nll"
    },
    "dpo": ["algorithm.method=dpo", "actor.policy_loss.dpo_nll_coef=0.5"],
    "bc": ["algorithm.method=bc"],
    "sppo": ["algorithm.method=sppo"],
    "bypass, clipped": [BYPASS + "ppo_clip_k3_rs"],
    "bypass, reinforce": [BYPASS + "pg_is"],
    "opsm": ["actor.policy_loss.opsm_threshold=0.05"],
    "rejecting": [REJECTING, "algorithm.rollout_correction.rollout_rs_threshold=0.4"],
    "no weights": ["algorithm.rollout_correction.rollout_is=null"],
}


def some_recipe(words: Sequence[str]) -> Recipe:
    base = [f"data.train_batch_size={N}", f"actor.ppo_mini_batch_size={N}", "actor.ppo_epochs=1"]
    return load(None, [*base, "data.max_response_length=9", "actor.optim.lr=1e-2", *words])[0]


def made(path: str, words: Sequence[str], rows: list[Trajectory] = ROWS) -> tuple[Learner, Experience]:
    """A learner some steps away from the policy the experience was made with."""
    some = some_recipe(words)
    actor, critic = models(path, "float64")
    e = experience_of(some, actor, critic, rows)
    moved(actor.model, 1)
    return learner_of(some, actor, critic), e


def backward(learner: Learner, e: Experience, rows: Sequence[int] = range(N)) -> list[Tensor]:
    learner.backward(Update("actor", tuple(rows), 0), e)
    return gradients(learner.actor.model)


def cut(learner: Learner, budget: int) -> Learner:
    other = copy.copy(learner)
    actor = learner.recipe.actor.model_copy(update={"ppo_max_token_len_per_gpu": budget})
    other.recipe = learner.recipe.model_copy(update={"actor": actor})
    other.objectives = objectives(other.recipe, learner.actor, learner.critic)
    return other


class OneOf:
    """Implements protocols.Mesh: a rank whose sums are its own part of them."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def add(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("name", RECIPES)
def test_any_cut_into_micro_batches_and_ranks_gives_the_same_gradients(name: str, tiny_lm: str) -> None:
    learner, e = made(tiny_lm, RECIPES[name])
    whole = backward(learner, e)
    assert any(gradient.abs().max() > 1e-6 for gradient in whole)
    for budget in (1, 30):
        for one, other in zip(whole, backward(cut(learner, budget), e), strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
    if name == "m2po":  # its mask needs what the other rank finds
        return
    for budget in (4096, 30):  # the second rank has nothing to do; both have
        ranks = []
        for number in range(OneOf.world_size):
            rank = cut(learner, budget)
            rank.mesh = OneOf(number)
            ranks.append(backward(rank, e))
        for one, first, second in zip(whole, *ranks, strict=True):
            torch.testing.assert_close(one, first + second, **CLOSE)


def test_ranks_give_the_critic_the_same_gradients(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, [])
    assert learner.critic is not None
    moved(learner.critic.model, 2)

    def critic_gradients(of: Learner) -> list[Tensor]:
        of.backward(Update("critic", tuple(range(N)), 0), e)
        return gradients(of.critic.model)  # type: ignore[union-attr]

    whole, ranks = critic_gradients(learner), []
    for number in range(OneOf.world_size):
        rank = cut(learner, 30)
        rank.mesh = OneOf(number)
        ranks.append(critic_gradients(rank))
    for one, first, second in zip(whole, *ranks, strict=True):
        torch.testing.assert_close(one, first + second, **CLOSE)


def test_every_loss_is_tried() -> None:
    tried = {some_recipe(words).actor.policy_loss.loss_mode for words in RECIPES.values()}
    assert tried == set(LOSSES) | set(PAIR_LOSSES)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("sapo", "actor.policy_loss.tau_pos=3"),
        ("dro", "actor.policy_loss.dro_beta=3"),
        ("topr", "actor.policy_loss.topr_ratio_max=1e-6"),
        ("awr", "actor.policy_loss.awr_beta=0.3"),
        ("awr", "actor.policy_loss.awr_weight_max=1"),
        ("m2po", "actor.policy_loss.m2po_threshold=1e-6"),
        ("sppo", "actor.policy_loss.sppo_eta=1"),
        ("dpo", "actor.policy_loss.dpo_beta=0.5"),
        ("dpo", "actor.policy_loss.dpo_nll_coef=0"),
        ("dpo", "actor.policy_loss.dpo_label_smoothing=0.3"),
        ("gspo", "actor.clip_ratio=1e-4"),
        ("cispo", "actor.clip_ratio_high=1e-4"),
        ("ppo_clip", "actor.clip_ratio_c=1.0001"),
    ],
)
def test_a_loss_hears_its_key(name: str, word: str, tiny_lm: str) -> None:
    plain, e = made(tiny_lm, RECIPES[name])
    others = [entry for entry in RECIPES[name] if entry.partition("=")[0] != word.partition("=")[0]]
    other = copy.copy(plain)
    other.recipe = some_recipe([*others, word])
    other.objectives = objectives(other.recipe, plain.actor, plain.critic)
    pairs = zip(backward(plain, e), backward(other, e), strict=True)
    assert any(not torch.equal(one, two) for one, two in pairs)


def test_rejected_tokens_teach_nothing_and_stay_in_the_denominator(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, [*RECIPES["rejecting"], "actor.use_kl_loss=false"])
    assert e.behavior_log_probs is not None
    assert e.loss_mask is not None
    left = correct(
        e.old_log_probs, e.behavior_log_probs, e.response_mask,
        rollout_rs="seq_mean_k3", rollout_rs_threshold=0.4,
    ).mask  # fmt: skip
    assert torch.equal(e.loss_mask, left)
    gone = (~left & e.response_mask).any(1)
    assert gone.any()
    assert not gone.all()
    whole = backward(learner, e)
    changed = dataclasses.replace(e, advantages=e.advantages.where(left, 1e6))
    for one, other in zip(whole, backward(learner, changed), strict=True):
        assert torch.equal(one, other)
    kept = tuple(int(i) for i in (~gone).nonzero()[:, 0])
    share = int(e.response_mask[torch.tensor(kept)].sum()) / int(e.response_mask.sum())
    for one, other in zip(whole, backward(learner, e, kept), strict=True):
        # The trunk's norms work in float32, so another scale is rounded in another way.
        torch.testing.assert_close(one, share * other, atol=1e-8, rtol=1e-6)


def test_m2po_drops_what_the_whole_mini_batch_says(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, ["algorithm.method=m2po", "actor.use_kl_loss=false"])
    assert e.behavior_log_probs is not None
    with torch.no_grad():
        now, _ = learner.actor.log_probs(e.rows, e.temperature)
    kept = m2po_mask(now, e.behavior_log_probs, e.response_mask, threshold=0.04)
    assert kept.any()
    assert not torch.equal(kept, e.response_mask)
    whole = backward(learner, e)
    changed = dataclasses.replace(e, advantages=e.advantages.where(kept, 1e6))
    for one, other in zip(whole, backward(learner, changed), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_a_pair_stays_in_one_micro_batch(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, RECIPES["dpo"])
    for update in learner.updates(N, 0):
        if update.role == "actor":
            assert all(
                a % 2 == 0 and b == a + 1 for a, b in zip(update.rows[0::2], update.rows[1::2], strict=True)
            )
            for part in cut(learner, 1)._micro_batches(update, e):
                assert len(part) == 2
                assert part[1] == part[0] + 1


GROUPED: list[tuple[str, Any]] = [
    ("grpo", lambda r: (r - r.mean()) / (r.std() + 1e-6)),
    ("rloo", lambda r: (r - r.mean()) * 2),
    ("remax", lambda r: r - 0.25),
]


@pytest.mark.parametrize(("name", "by_hand"), GROUPED)
def test_group_baselines_see_the_prompt_s_rows(name: str, by_hand: Any, tiny_lm: str) -> None:
    rows = [dataclasses.replace(row, baseline_score=0.25) for row in ROWS]
    some = some_recipe([f"algorithm.adv_estimator={name}"])
    actor, _ = models(tiny_lm, "float64")
    e = experience_of(some, actor, None, rows)
    scores = torch.tensor([[1.0, 0.0]] * (N // 2))
    expected = torch.stack([by_hand(pair) for pair in scores]).flatten().double()
    for row, value in enumerate(expected):
        found = e.advantages[row][e.response_mask[row]].double()
        torch.testing.assert_close(found, value.expand_as(found), atol=1e-5, rtol=1e-5)


def test_v_trace_is_gae_s_target_where_every_ratio_is_one(tiny_lm: str) -> None:
    actor, critic = models(tiny_lm, "float64")
    e = experience_of(recipe(N), actor, critic, ROWS)
    own = [
        dataclasses.replace(
            row, behavior_log_probs=e.old_log_probs[i, : len(row.response_ids)].float().numpy()
        )
        for i, row in enumerate(ROWS)
    ]
    traced = experience_of(some_recipe(["algorithm.adv_estimator=vtrace"]), actor, critic, own)
    plain = experience_of(some_recipe([]), actor, critic, own)
    assert traced.returns is not None
    assert plain.returns is not None
    torch.testing.assert_close(traced.returns, plain.returns, atol=1e-5, rtol=1e-5)
    assert traced.metrics["rollout_corr/trace_kept"] == pytest.approx(1, abs=1e-4)
    stale = experience_of(some_recipe(["algorithm.adv_estimator=vtrace"]), actor, critic, ROWS)
    assert stale.metrics["rollout_corr/trace_kept"] < 0.9
