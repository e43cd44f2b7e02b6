"""Losses against hand answers, and sums that no cut of the batch can change."""

import math

import pytest
import torch
from torch import Tensor

from rein.functional.losses.aggregate import MODES, aggregate
from rein.functional.losses.imitation import negative_log_likelihood
from rein.functional.losses.ppo import PolicyLoss, ppo_clip
from rein.functional.losses.value import value_loss

NAN = math.nan


def surrogate(ratio: float, advantage: float, weight: float | None = None, **clip: float) -> PolicyLoss:
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0} | clip
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    weights = None if weight is None else torch.tensor([[weight]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    return ppo_clip(old + math.log(ratio), old, advantages, weights, **options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "clipped_lower"),
    [
        (1.0, 1.0, -1.0, False, False),
        (1.1, 1.0, -1.1, False, False),
        (10.0, 1.0, -1.2, True, False),  # the dual clip is for bad actions only
        (0.5, 1.0, -0.5, False, False),
        (10.0, -1.0, 3.0, False, True),
        (2.0, -1.0, 2.0, False, False),
        (0.5, -1.0, 0.8, True, False),
        (10.0, 0.0, 0.0, False, False),
    ],
)
def test_the_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, clipped: bool, clipped_lower: bool
) -> None:
    found = surrogate(ratio, advantage)
    assert found.losses.item() == pytest.approx(loss)
    assert found.clipped.item() is clipped
    assert found.clipped_lower.item() is clipped_lower
    assert found.log_ratio.item() == pytest.approx(math.log(ratio))


def test_the_clip_may_be_wider_above_than_below() -> None:
    assert surrogate(2.0, 1.0, clip_ratio_high=0.28).losses.item() == pytest.approx(-1.28)
    assert surrogate(0.1, -1.0, clip_ratio_low=0.1).losses.item() == pytest.approx(0.9)


@pytest.mark.parametrize("c", [1.0, 0.5, -3.0])
def test_a_dual_clip_that_would_cut_good_updates_is_refused(c: float) -> None:
    with pytest.raises(ValueError, match="must be above 1"):
        surrogate(1.0, 1.0, clip_ratio_c=c)


def test_the_weight_multiplies_what_was_clipped() -> None:
    assert surrogate(10.0, 1.0, weight=0.5).losses.item() == pytest.approx(-0.6)
    assert surrogate(10.0, -1.0, weight=0.5).losses.item() == pytest.approx(1.5)


def test_gradients_stop_where_the_clip_acts_and_at_ratio_1_are_minus_the_advantage() -> None:
    old = torch.zeros(1, 4)
    log_probs = torch.log(torch.tensor([[1.0, 5.0, 0.1, 5.0]])).requires_grad_(True)
    advantages = torch.tensor([[2.0, 1.0, -1.0, -1.0]])
    options = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    ppo_clip(log_probs, old, advantages, None, **options).losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-2.0, 0.0, 0.0, 0.0]]


def test_the_value_clip_by_hand() -> None:
    """Old V .5, new V 2, return 0, clip .2: max(4, .49) / 2, and the clip did not decide."""
    found, clipped = value_loss(
        torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.tensor([[0.0]]), cliprange_value=0.2
    )
    assert found.item() == pytest.approx(2.0)
    assert clipped.item() is False
    # new V moved onto the return, which the clip does not allow: (.7 - 2)^2 / 2
    found, clipped = value_loss(
        torch.tensor([[2.0]]), torch.tensor([[0.5]]), torch.tensor([[2.0]]), cliprange_value=0.2
    )
    assert found.item() == pytest.approx(0.5 * 1.3**2)
    assert clipped.item() is True


def test_without_old_values_nothing_is_clipped() -> None:
    found, clipped = value_loss(torch.tensor([[2.0]]), None, torch.tensor([[5.0]]), cliprange_value=0.2)
    assert found.item() == 4.5
    assert clipped.item() is False


LOSSES = torch.tensor([[1.0, 2.0, 6.0], [4.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
BY_HAND = {
    "token-mean": 13 / 4,
    "token-sum": 13.0,
    "seq-mean-token-sum": (9 + 4) / 2,
    "seq-mean-token-mean": (3 + 4) / 2,
    "seq-mean-token-sum-norm": (9 + 4) / 2 / 3,
}


@pytest.mark.parametrize("mode", MODES)
def test_each_aggregation_by_hand(mode: str) -> None:
    assert aggregate(LOSSES, MASK, mode).item() == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_sum_to_the_whole(mode: str) -> None:
    """The denominators are the whole batch's; the padding of a part is its own."""
    options = {"tokens": 4.0, "rows": 2.0, "scale": 3.0}
    parts = [aggregate(LOSSES[:1], MASK[:1], mode, **options)]
    parts += [aggregate(LOSSES[1:, :1], MASK[1:, :1], mode, **options)]
    assert sum(part.item() for part in parts) == pytest.approx(BY_HAND[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_part_where_nothing_counts_gives_zero_with_a_usable_graph(mode: str) -> None:
    losses = torch.full((2, 3), NAN, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for options in ({}, {"tokens": 4.0, "rows": 2.0}, {"tokens": 0.0, "rows": 0.0}):
        losses.grad = None
        loss = aggregate(losses, nothing, mode, **options)
        loss.backward()
        assert loss.item() == 0
        assert losses.grad is not None
        assert losses.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("mode", MODES)
def test_masked_losses_get_no_gradient(mode: str) -> None:
    losses = LOSSES.clone().requires_grad_(True)
    aggregate(losses, MASK, mode).backward()
    assert losses.grad is not None
    assert losses.grad.isfinite().all()
    assert (losses.grad[~MASK] == 0).all()
    assert (losses.grad[MASK] > 0).all()


def test_an_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="'mean' is unknown; known: token-mean"):
        aggregate(LOSSES, MASK, "mean")


def test_imitation_raises_the_likelihood_of_the_rows_that_count() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, False]])
    loss = aggregate(negative_log_likelihood(log_probs), mask, "token-mean")
    loss.backward()
    assert loss.item() == 1.5
    grad: Tensor | None = log_probs.grad
    assert grad is not None
    assert grad.tolist() == [[-0.5, -0.5], [0, 0]]
