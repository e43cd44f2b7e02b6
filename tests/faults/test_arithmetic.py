"""B19 to B29: the arithmetic of means, clips, KL, entropy, temperature, weights, packs and small steps."""

import math

import pytest
import torch
from rows_made import row

from rein.config.load import load
from rein.engines.sampling import choose
from rein.errors import ConfigError
from rein.functional.advantages import ESTIMATORS, gae
from rein.functional.kl import KINDS, kl_penalty
from rein.functional.log_probs import entropy_of, log_probs_of
from rein.functional.losses.aggregate import MODES, aggregate
from rein.functional.losses.ppo import ppo_clip
from rein.functional.losses.table import LOSSES
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_mean, masked_var, whiten
from rein.functional.rewards import subtract_kl
from rein.functional.weights import importance_weights
from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.runtime.optimizer import Optimizer

T, F = True, False
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


# ---- B19: mean over zero tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_a_token_adds_zero_and_its_graph_can_be_used(mode: str) -> None:
    """So that every rank calls backward; the healthy neighbor's gradient is what it is alone."""
    log_probs = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[T, T], [F, F]])
    whole = {"tokens": 2.0, "rows": 1.0, "scale": 2.0}
    empty = aggregate(-log_probs[1:], mask[1:], mode, **whole)
    healthy = aggregate(-log_probs[:1], mask[:1], mode, **whole)
    assert empty.item() == 0
    empty.backward()
    assert log_probs.grad is not None
    assert not log_probs.grad.any()
    (alone,) = torch.autograd.grad(healthy, log_probs)
    (both,) = torch.autograd.grad(aggregate(-log_probs, mask, mode, **whole), log_probs)
    assert torch.equal(alone, both)


def test_no_epsilon_is_seen_in_a_healthy_mean() -> None:
    tiny = torch.full((1, 2), 3e-9, dtype=torch.float64)
    mask = torch.tensor([[T, F]])
    assert masked_mean(tiny, mask).item() == 3e-9
    assert aggregate(tiny, mask, "seq-mean-token-mean").item() == 3e-9


# ---- B20: whitening without spread


@pytest.mark.parametrize("center", [True, False], ids=["whole", "scale only"])
@pytest.mark.parametrize("rewards", [[0.95] * 8, [7.0], [1e-3] * 3], ids=["equal", "one token", "small"])
def test_values_without_spread_become_zeros_not_nan_and_not_a_thousand(
    rewards: list[float], center: bool
) -> None:
    values = torch.tensor([rewards])
    found = whiten(values, torch.ones_like(values, dtype=torch.bool), center=center)
    assert (found == 0).all()


def test_a_variance_is_taken_in_two_passes() -> None:
    """In one pass, E[x^2] - E[x]^2 of seven .95 is 1.8e-7 in float32; near 1000 nothing is left of .01."""
    seven = torch.full((1, 7), 0.95)
    everywhere = torch.ones(1, 7, dtype=torch.bool)
    assert masked_var(seven, everywhere).item() < 1e-12
    near = 1000 + 0.01 * torch.arange(7.0).unsqueeze(0)
    assert masked_var(near, everywhere).item() == pytest.approx(1e-4 * 28 / 6, rel=2e-2)


def test_scaling_alone_leaves_the_mean_scaled_not_added_back() -> None:
    values = torch.tensor([[10.0, 14.0]], dtype=torch.float64)
    found = whiten(values, torch.ones(1, 2, dtype=torch.bool), center=False)
    assert found.tolist()[0] == pytest.approx([10 / 8**0.5, 14 / 8**0.5])


# ---- B21: dual clip


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"), [(-1.0, 10.0, 3.0), (1.0, 10.0, -1.2), (-1.0, 0.5, 0.8)]
)
def test_the_dual_clip_is_for_bad_actions_alone(advantage: float, ratio: float, expected: float) -> None:
    old = torch.zeros(1, 1)
    found = ppo_clip(old + math.log(ratio), old, torch.tensor([[advantage]]), None, **CLIP)
    assert found.losses.item() == pytest.approx(expected)


@pytest.mark.parametrize("c", [1.0, 0.0])
def test_a_dual_clip_of_one_or_less_is_refused(c: float) -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="must be above 1"):
        ppo_clip(one, one, one, None, **(CLIP | {"clip_ratio_c": c}))
    with pytest.raises(ConfigError, match="clip_ratio_c"):
        load(None, [f"actor.clip_ratio_c={c}"])


# ---- B22: value clip and its metric


def test_the_value_clip_and_the_share_it_decides_are_of_counted_tokens() -> None:
    """Old .5, new 2: the clip to .7 decides for return 2, not for return 0; what is masked has no share."""
    new = torch.tensor([[2.0, 2.0, 99.0]])
    old = torch.tensor([[0.5, 0.5, 0.0]])
    returns = torch.tensor([[0.0, 2.0, math.nan]])
    losses, clipped = value_loss(new, old, returns, torch.tensor([[T, T, F]]), cliprange_value=0.2)
    assert losses[0].tolist() == pytest.approx([2.0, 0.5 * 1.3**2, 0])
    assert clipped.tolist() == [[F, T, F]]


# ---- B23: the reported KL is the KL used


def test_k1_may_be_negative_without_alarm_and_no_other_kind_may() -> None:
    less_sure = torch.tensor([[-3.0]])
    assert kl_penalty(less_sure, torch.tensor([[-1.0]]), "k1").item() == -2
    for kind in KINDS:
        if kind.removesuffix("+") not in ("k1", "kl"):
            assert kl_penalty(less_sure, torch.tensor([[-1.0]]), kind).item() > 0, kind


def test_two_kls_at_once_need_an_explicit_yes() -> None:
    with pytest.raises(ConfigError, match="counts the KL twice"):
        load(None, ["algorithm.use_kl_in_reward=true"])
    recipe, _ = load(None, ["algorithm.use_kl_in_reward=true", "algorithm.insist=true"])
    assert recipe.actor.use_kl_loss
    recipe, _ = load(None, ["algorithm.use_kl_in_reward=true", "actor.use_kl_loss=false"])
    assert recipe.algorithm.use_kl_in_reward


# ---- B24: the KL is altered before it is logged


def test_the_logged_kl_is_the_one_that_was_subtracted_and_stays_it() -> None:
    scores = torch.tensor([[0.0, 1.0]])
    old, ref = torch.tensor([[-0.9, -0.8]]), torch.tensor([[-1.0, -1.0]])
    both = torch.ones(1, 2, dtype=torch.bool)
    rewards, kl = subtract_kl(scores, old, ref, both, kl_coef=0.5, kind="k1")
    assert rewards[0].tolist() == pytest.approx([-0.05, 0.9])
    rewards.zero_()
    assert kl[0].tolist() == pytest.approx([0.1, 0.2])


# ---- B25: entropy


def test_entropy_of_an_impossible_token_of_a_pad_and_at_a_temperature() -> None:
    assert entropy_of(torch.tensor([[0.0, -math.inf]])).item() == 0
    logits = torch.tensor([[[0.0, 0.0], [math.nan, math.nan]]])
    mask = torch.tensor([[T, F]])
    assert aggregate(entropy_of(logits), mask, "token-mean").item() == pytest.approx(math.log(2))
    z = torch.tensor([[1.0, 2.0, 4.0]])
    p = (z / 0.5).softmax(-1)
    expected = -(p * p.log()).sum().item()
    assert entropy_of(z, torch.tensor([0.5])).item() == pytest.approx(expected)


def test_an_entropy_bonus_raises_entropy() -> None:
    """The loss is minus the bonus, so a step down its gradient flattens."""
    logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    before = entropy_of(logits)
    (gradient,) = torch.autograd.grad(-0.01 * before.sum(), logits)
    assert entropy_of(logits - gradient).item() > before.item()


# ---- B26: temperature in one place only


def test_log_probs_entropy_and_sampling_are_at_one_temperature_and_zero_never_divides() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.5]])
    at = torch.tensor([0.6])
    expected = (logits / 0.6).log_softmax(-1)
    assert log_probs_of(logits, torch.tensor([0]), at).item() == pytest.approx(expected[0, 0].item())
    entropy = -(expected.exp() * expected).sum().item()
    assert entropy_of(logits, at).item() == pytest.approx(entropy)
    draws = torch.tensor([0.5], dtype=torch.float64)
    ids, found = choose(logits, temperature=0.6, top_p=1.0, draws=draws)
    assert found.item() == pytest.approx(expected[0, ids.item()].item())
    ids, found = choose(logits, temperature=0, top_p=1.0, draws=draws)
    assert ids.item() == 1
    assert found.isfinite().all()


def test_the_actor_uses_each_row_s_temperature_and_the_critic_has_none(tiny_lm: str) -> None:
    rows = [row([3, 4], [5, 6]), row([3, 4], [5, 6])]
    with torch.no_grad():
        found, _ = load_actor(tiny_lm).log_probs(rows, torch.tensor([0.6, 1.0]))
        values = load_critic(tiny_lm).values(rows)
    assert not torch.allclose(found[0], found[1])
    assert torch.equal(values[0], values[1])


# ---- B27: weights upside down, on the wrong pair, or attached


@pytest.mark.parametrize(("behavior", "expected"), [(-2.0, 2.0), (-0.5, 0.6065)])
def test_the_weight_is_old_over_behavior_cut_and_detached(behavior: float, expected: float) -> None:
    old = torch.tensor([[-1.0]], requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.bool)
    found = importance_weights(old, torch.tensor([[behavior]]), one, level="token", threshold=2.0).applied
    assert found.item() == pytest.approx(expected, abs=5e-5)
    assert not found.requires_grad


def test_two_hundred_small_steps_are_a_product_for_a_response_and_a_mean_in_geometric_mode() -> None:
    """200 tokens at +.01: e^2 for the response, e^.01 for its geometric mean and for each token."""
    behavior = torch.full((1, 200), -1.0)
    everywhere = torch.ones(1, 200, dtype=torch.bool)
    for level, expected in (
        ("sequence", math.exp(2)),
        ("geometric", math.exp(0.01)),
        ("token", math.exp(0.01)),
    ):
        found = importance_weights(behavior + 0.01, behavior, everywhere, level=level, threshold=99.0)
        assert found.applied[0, 7].item() == pytest.approx(expected, rel=1e-4)


def test_no_loss_lets_a_gradient_into_the_denominator_or_the_weights() -> None:
    leaves = [torch.full((2, 3), value, requires_grad=True) for value in (-1.0, -1.5, 1.0)]
    log_probs, behavior, raw = leaves
    mask = torch.ones(2, 3, dtype=torch.bool)
    for name in ("ppo_clip", "cispo", "topr", "gpg"):
        options = {word: CLIP[word] for word in LOSSES[name].options}
        weights = importance_weights(raw, behavior, mask, level="token", threshold=2.0).applied
        found = LOSSES[name].compute(log_probs, behavior.detach(), torch.ones(2, 3), weights, mask, **options)
        slopes = torch.autograd.grad(found.losses.sum(), leaves, allow_unused=True)
        assert slopes[0] is not None
        assert slopes[1] is None
        assert slopes[2] is None


# ---- B28: packed rows see each other


def test_rows_of_a_pack_do_not_see_each_other_nor_do_their_advantages(tiny_lm: str) -> None:
    """A's tokens change and B's log-probs do not; B's advantages are those it has alone."""
    actor = load_actor(tiny_lm)
    b = row([4, 5], [6, 7])
    with torch.no_grad():
        alone, _ = actor.log_probs([b], torch.ones(1))
        packed, _ = actor.log_probs([row([1], [2, 3]), b], torch.ones(2))
        other, _ = actor.log_probs([row([9], [8, 7]), b], torch.ones(2))
    torch.testing.assert_close(packed[1:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[1], other[1], atol=1e-5, rtol=0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    rewards = torch.tensor([[5.0, 9.0], [0.0, 1.0]])
    options = {"gamma": 0.9, "lam": 0.95}
    both, _ = gae(rewards, packed, mask, torch.zeros(2), **options)
    one, _ = gae(rewards[1:], packed[1:], mask[1:], torch.zeros(1), **options)
    assert torch.equal(both[1:], one)


# ---- B29: weights in half precision swallow small steps


def test_the_weights_that_are_trained_take_steps_of_a_millionth(tiny_lm: str) -> None:
    """50 AdamW steps at 1e-6 move .5 by 5e-5: seen by float32, lost by bfloat16, which is not trained."""
    recipe, _ = load(None, ["actor.optim.lr=1e-6", "actor.optim.weight_decay=0"])
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(100, 10, bias=False, dtype=dtype)
        torch.nn.init.constant_(layer.weight, 0.5)
        optimizer = Optimizer(layer, recipe.actor.optim, grad_clip=1e9, total_steps=50)
        for _ in range(50):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.apply(1.0)
        moved[dtype] = (layer.weight - 0.5).abs()
    assert moved[torch.float32].mean().item() == pytest.approx(5e-5, rel=0.05)
    assert not moved[torch.bfloat16].any()
    trained = load_actor(tiny_lm).model
    assert {p.dtype for p in trained.parameters() if p.requires_grad} == {torch.float32}
    with pytest.raises(ConfigError, match="dtype"):
        load(None, ["model.dtype=bfloat16"])


def test_every_estimator_and_loss_is_in_its_table() -> None:
    assert {"gae", "vtrace", "monte_carlo", "grpo", "rloo", "remax", "opo"} <= set(ESTIMATORS)
    assert {"ppo_clip", "gspo", "cispo", "topr", "awr", "m2po", "sppo", "nll"} <= set(LOSSES)
