"""DPO against hand answers."""

import math

import pytest
import torch

from rein.functional.losses.dpo import PAIR_LOSSES, PairLoss, dpo

T, F = True, False


def pair(**options: float) -> tuple[PairLoss, torch.Tensor, torch.Tensor]:
    """Chosen: log pi -1, -2 against -2, -3; rejected: -4 against -3 and a masked token."""
    chosen = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rejected = torch.tensor([[-4.0, math.nan]], requires_grad=True)
    found = dpo(
        chosen,
        rejected,
        torch.tensor([[-2.0, -3.0]]),
        torch.tensor([[-3.0, -9.0]]),
        torch.tensor([[T, T]]),
        torch.tensor([[T, F]]),
        **options,
    )
    return found, chosen, rejected


def test_dpo_by_hand() -> None:
    """Log-ratios 2 and -1: -log sigmoid(.1 * 3); the gradient is -.1 sigmoid(-.3) per chosen token."""
    found, chosen, rejected = pair(beta=0.1)
    assert found.losses.item() == pytest.approx(math.log(1 + math.exp(-0.3)))
    assert found.margin.item() == pytest.approx(0.3)
    assert found.right.item() is True
    found.losses.sum().backward()
    slope = 0.1 / (1 + math.exp(0.3))
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.tolist()[0] == pytest.approx([-slope] * 2)
    assert rejected.grad.tolist()[0] == pytest.approx([slope, 0])


def test_the_nll_term_is_of_the_chosen_response_per_token() -> None:
    plain, _, _ = pair()
    found, _, _ = pair(nll_coef=0.5)
    assert found.nll.item() == 1.5
    assert (found.losses - plain.losses).item() == pytest.approx(0.75)


def test_label_smoothing_believes_the_pair_a_little_less() -> None:
    found, _, _ = pair(beta=0.1, label_smoothing=0.25)
    right, wrong = math.log(1 + math.exp(-0.3)), math.log(1 + math.exp(0.3))
    assert found.losses.item() == pytest.approx(0.75 * right + 0.25 * wrong)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_pair_losses_are_finite_far_from_the_reference(name: str, far: float) -> None:
    chosen = torch.full((2, 3), far, requires_grad=True)
    rejected = torch.zeros(2, 4, requires_grad=True)
    mask = torch.tensor([[T, T, T], [F, F, F]])
    other = torch.ones(2, 4, dtype=torch.bool)
    found = PAIR_LOSSES[name](
        chosen, rejected, torch.zeros(2, 3), torch.zeros(2, 4), mask, other, beta=1.0, nll_coef=1.0
    )
    found.losses.sum().backward()
    assert chosen.grad is not None
    assert found.losses.isfinite().all()
    assert chosen.grad.isfinite().all()
