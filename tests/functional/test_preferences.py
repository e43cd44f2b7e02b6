"""The loss of pairs by hand, and ties that are not wins."""

import math

import pytest
import torch

from rein.functional.preferences import bradley_terry_loss, pair_statistics


def test_the_pair_loss_by_hand() -> None:
    chosen, rejected = torch.tensor([0.0, math.log(3), 50.0]), torch.tensor([0.0, 0.0, -50.0])
    found = bradley_terry_loss(chosen, rejected)
    assert found.tolist() == pytest.approx([math.log(2), math.log(4 / 3), 0])


def test_a_margin_is_asked_of_the_gap() -> None:
    three, one = torch.tensor([3.0]), torch.tensor([1.0])
    assert bradley_terry_loss(three, one, torch.tensor([2.0])).item() == pytest.approx(math.log(2))


def test_a_hopeless_pair_gives_a_finite_loss_and_the_largest_pull() -> None:
    chosen = torch.tensor([-500.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([500.0]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(1000)
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-1)


def test_ties_are_counted_apart_from_wins() -> None:
    found = pair_statistics(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.0, 2.0, 5.0, 3.0]))
    assert found == {"accuracy": 0.5, "ties": 0.25, "margin": 0.0}
