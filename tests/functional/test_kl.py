"""KL estimators against hand answers: x = log pi, r = log pi_ref, z = r - x."""

import math

import pytest
import torch

from rein.functional.kl import (
    EXACT_KINDS,
    KINDS,
    adaptive_kl_coef,
    kl_penalty,
    moving_average_kl,
    off_policy_kl,
    off_policy_kl_loss,
)
from rein.functional.log_probs import exact_kl, log_probs_of

E26 = math.exp(2.6)
# kind: (value, d value / d x) at z = -1, z = 1, z = 3
HAND = {
    "k1": [(1.0, 1.0), (-1.0, 1.0), (-3.0, 1.0)],
    "abs": [(1.0, 1.0), (1.0, -1.0), (3.0, -1.0)],
    "k2": [(0.5, 1.0), (0.5, -1.0), (4.5, -3.0)],
    "k3": [(math.exp(-1), 1 - math.exp(-1)), (math.e - 2, 1 - math.e), (10.0, 0.0)],
    "k3_soft": [
        (math.exp(-1), 1 - math.exp(-1)),
        (math.e - 2, 1 - math.e),
        (E26 - 3.6 + 0.4 * (E26 - 1), 1 - E26),
    ],
}
SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def pair(z: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    return x, x.detach() + z


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_value_and_gradient_of_its_formula(kind: str) -> None:
    base = kind.removesuffix("+")
    for z, (value, slope) in zip((-1.0, 1.0, 3.0), HAND[SAME.get(base, base)], strict=True):
        x, r = pair(z)
        found = kl_penalty(x, r, kind)
        found.sum().backward()
        assert found.item() == pytest.approx(value)
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(-z if kind.endswith("+") else slope)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_zero_at_the_reference_and_finite_far_from_it(kind: str) -> None:
    x, r = pair(0.0)
    assert kl_penalty(x, r, kind).item() == 0
    for z in (-80.0, 80.0):
        x, r = pair(z)
        found = kl_penalty(x, r, kind)
        found.sum().backward()
        assert x.grad is not None
        assert math.isfinite(found.item())
        assert math.isfinite(x.grad.item())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.removesuffix("+") not in ("k1", "kl")])
def test_only_k1_may_be_negative(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, r = -5 * torch.rand(2, 1000, generator=generator)
    assert (kl_penalty(x, r, kind) >= -1e-6).all()
    assert (kl_penalty(x, r, "k1") < 0).any()


def test_k3_soft_pulls_back_where_k3_lets_go() -> None:
    z = torch.tensor([2.59, 2.6, 2.61, 5.0, 50.0], dtype=torch.float64)
    x = torch.zeros_like(z, requires_grad=True)
    kl_penalty(x, z, "k3_soft").sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1 - math.exp(2.59), *[1 - E26] * 4])
    x = torch.zeros_like(z, requires_grad=True)
    kl_penalty(x, z, "k3").sum().backward()
    assert x.grad is not None
    assert x.grad[3:].tolist() == [0, 0]


def test_an_estimator_leaves_what_it_is_given_alone() -> None:
    for kind in KINDS:
        x, r = torch.tensor([[-1.0, -9.0]]), torch.tensor([[-4.0, -2.0]])
        kl_penalty(x, r, kind)
        assert x.tolist() == [[-1, -9]]
        assert r.tolist() == [[-4, -2]]


def test_weighed_by_the_behavior_policy_the_watched_kl_is_the_exact_one() -> None:
    generator = torch.Generator().manual_seed(3)
    actor, ref, behavior = torch.randn(3, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (actor.exp() * (actor - ref)).sum()
    found = (behavior.exp() * off_policy_kl(actor, ref, behavior)).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_on_stored_tokens_the_off_policy_loss_has_the_gradient_of_the_exact_kl() -> None:
    generator = torch.Generator().manual_seed(6)
    ref, behavior = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = behavior + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64)  # no weight is capped
    leaf = logits.clone().requires_grad_(True)
    actor = leaf.log_softmax(-1)
    assert (actor - behavior).max() < math.log(2)
    loss = (behavior.exp() * off_policy_kl_loss(actor, ref, behavior)).sum()
    exact = (actor.exp() * (actor - ref)).sum()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-12)
    expected = torch.autograd.grad(exact, leaf, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf), expected)


def test_a_token_that_the_actor_dropped_is_not_held_by_the_off_policy_loss() -> None:
    """By hand: pi / mu = 2e-6 / .5, log(pi / ref) = ln 4e-6; k3_soft pulls with its slope, e^2.6 - 1."""
    x = torch.tensor([math.log(2e-6)], dtype=torch.float64, requires_grad=True)
    half = torch.tensor([math.log(0.5)], dtype=torch.float64)
    (soft,) = torch.autograd.grad(kl_penalty(x, half, "k3_soft").sum(), x)
    (ours,) = torch.autograd.grad(kl_penalty(x, half, "off_policy", behavior_log_probs=half).sum(), x)
    assert soft.item() == pytest.approx(1 - E26)
    assert ours.item() == pytest.approx(4e-6 * (math.log(4e-6) - 2))


def test_probability_that_leaves_the_stored_tokens_is_pulled_back() -> None:
    """Behavior says tokens 0 and 1 only, where the actor is as the reference: the rest is pushed down."""
    leaf = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    actor = leaf.log_softmax(-1)
    half = torch.full((2,), math.log(0.5), dtype=torch.float64)
    loss = (0.5 * kl_penalty(actor[:2], actor.detach()[:2], "off_policy", behavior_log_probs=half)).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25])  # .25 (-2) (1 - .5), and .25 * 1


def test_the_watched_kl_of_one_token_by_hand() -> None:
    log = math.log
    # w = .5 / .25 = 2, ref / mu = .25 / .5: .5 (2 ln 2 - 1)
    found = off_policy_kl(torch.tensor([log(0.5)]), torch.tensor([log(0.25)]), torch.tensor([log(0.5)]))
    assert found.item() == pytest.approx(0.5 * (2 * log(2) - 1))


def test_the_watched_kl_is_never_negative_and_bounded_where_asked() -> None:
    generator = torch.Generator().manual_seed(4)
    actor, ref, behavior = -30 * torch.rand(3, 2000, generator=generator)
    raw = off_policy_kl(actor, ref, behavior)
    assert (raw >= 0).all()
    assert raw.isfinite().all()
    assert raw.max() > 10
    assert off_policy_kl(actor, ref, behavior, cap=10.0).max() == 10
    near = off_policy_kl(ref + 1e-4, ref, ref)
    torch.testing.assert_close(near, torch.full_like(near, 0.5e-8), rtol=0.2, atol=0)


def test_the_adaptive_coefficient_is_that_of_the_paper() -> None:
    """.1 (1 + .2 * 256 / 10000): the error 12 / 6 - 1 is cut to .2."""
    found = adaptive_kl_coef(0.1, 12, rows=256, target_kl=6, horizon=10000)
    assert found == pytest.approx(0.100512, abs=1e-12)
    assert adaptive_kl_coef(0.1, 6, rows=256, target_kl=6, horizon=10000) == 0.1
    down = adaptive_kl_coef(0.1, 5.4, rows=256, target_kl=6, horizon=10000)
    assert down == pytest.approx(0.1 * (1 - 0.1 * 256 / 10000))


def test_a_coefficient_at_most_doubles_or_halves_whatever_the_batch() -> None:
    assert adaptive_kl_coef(0.1, 0, rows=10**6, target_kl=6, horizon=100) == 0.05
    assert adaptive_kl_coef(0.1, 100, rows=10**6, target_kl=6, horizon=100) == 0.2


def test_full_is_the_exact_kl_and_its_plus_form_has_the_gradient_of_k2() -> None:
    generator = torch.Generator().manual_seed(5)
    logits, ref_logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    ids = torch.tensor([1, 0, 6])
    for kind in EXACT_KINDS:
        leaf = logits.clone().requires_grad_(True)
        x, r = log_probs_of(leaf, ids), log_probs_of(ref_logits, ids)
        found = kl_penalty(x, r, kind, exact=exact_kl(leaf, ref_logits))
        torch.testing.assert_close(found, exact_kl(logits, ref_logits))
        carrier = exact_kl(leaf, ref_logits) if kind == "full" else kl_penalty(x, r, "k2")
        expected = torch.autograd.grad(carrier.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), leaf), expected)


def test_kinds_that_do_not_exist_or_lack_what_they_need_are_named() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="'full' needs `exact`"):
        kl_penalty(x, x, "full")
    with pytest.raises(ValueError, match="'off_policy' needs `behavior_log_probs`"):
        kl_penalty(x, x, "off_policy")
    with pytest.raises(ValueError, match=r"'k4\+' is unknown; known: kl, k1"):
        kl_penalty(x, x, "k4+")


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_the_reference_never_says_gives_finite_numbers(kind: str) -> None:
    """A logit masked with the lowest float is -3.4e38 nats away."""
    lowest = torch.finfo(torch.float32).min
    for x_value, r_value in ((-1.0, lowest), (lowest, -1.0), (lowest, lowest)):
        x = torch.tensor([x_value], requires_grad=True)
        found = kl_penalty(x, torch.tensor([r_value]), kind)
        found.sum().backward()
        assert x.grad is not None
        assert found.isfinite().all()
        assert x.grad.isfinite().all()


def test_a_reading_that_is_not_a_number_moves_nothing() -> None:
    assert adaptive_kl_coef(0.1, math.nan, rows=64, target_kl=0.1, horizon=1000) == 0.1
    assert adaptive_kl_coef(0.1, math.inf, rows=64, target_kl=0.1, horizon=64) == pytest.approx(0.12)
    assert moving_average_kl(0.3, math.nan, rows=64, horizon=1000) == 0.3
    assert moving_average_kl(None, math.inf, rows=64, horizon=1000) is None


def test_the_moving_average_forgets_with_the_rows_and_starts_at_the_first_reading() -> None:
    """(1 - 1/4)^2 of the old, the rest of the new: .5625 * .2 + .4375 * .6."""
    first = moving_average_kl(None, 0.2, rows=999, horizon=4)
    assert first == 0.2
    assert moving_average_kl(first, 0.6, rows=2, horizon=4) == pytest.approx(0.5625 * 0.2 + 0.4375 * 0.6)
    one_by_one = moving_average_kl(moving_average_kl(first, 0.6, rows=1, horizon=4), 0.6, rows=1, horizon=4)
    assert one_by_one == pytest.approx(0.5625 * 0.2 + 0.4375 * 0.6)
    assert moving_average_kl(0.2, 0.6, rows=3, horizon=0.5) == 0.6
