"""GAE against numbers worked out by hand, and what masked positions may not do."""

import math

import pytest
import torch
from torch import Tensor

from rein.functional.advantages import ESTIMATORS, INPUTS, discounted_returns, gae

NAN = math.nan
VALUES = torch.tensor([[0.5, 0.6, 0.7]])
REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
ALL = torch.ones(1, 3, dtype=torch.bool)
TERMINAL = torch.zeros(1)
OPTIONS = {
    "gae": {"gamma": 0.9, "lam": 0.95},
    "vtrace": {"gamma": 0.9, "lam": 0.95, "threshold": 2.0},
    "monte_carlo": {"gamma": 0.9},
    "reinforce_plus_plus": {"gamma": 0.9},
}


def estimate(
    name: str, rewards: Tensor, values: Tensor, mask: Tensor, filler: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The estimator called `name` on one row whose other inputs are the same wherever it counts."""
    old, behavior = torch.full(mask.shape, filler), torch.full(mask.shape, filler)
    old[mask], behavior[mask] = torch.tensor([-1.0, -2.0, -0.5])[: mask.sum()], -1.0
    known = {
        "token_level_rewards": rewards,
        "values": values,
        "response_mask": mask,
        "bootstrap_values": TERMINAL,
        "old_log_probs": old,
        "behavior_log_probs": behavior,
        "groups": torch.zeros(1, dtype=torch.long),
        "baseline_scores": torch.tensor([0.25]),
    }
    return ESTIMATORS[name](*(known[word] for word in INPUTS[name]), **OPTIONS.get(name, {}))


def test_gae_by_hand() -> None:
    """delta = .1, .1, .3; A_3 = .3, A_2 = .1 + .95 * .3, A_1 = .1 + .95 A_2."""
    found, returns = gae(REWARDS, VALUES, ALL, TERMINAL, gamma=1.0, lam=0.95)
    assert found.tolist()[0] == pytest.approx([0.46575, 0.385, 0.3])
    assert returns.tolist()[0] == pytest.approx([0.96575, 0.985, 1.0])


def test_gae_with_discount_by_hand() -> None:
    """delta = -.5 + .54, -.6 + .63, .3; gamma lam = .45."""
    found, _ = gae(REWARDS, VALUES, ALL, TERMINAL, gamma=0.9, lam=0.5)
    assert found.tolist()[0] == pytest.approx([0.04 + 0.45 * (0.03 + 0.45 * 0.3), 0.03 + 0.45 * 0.3, 0.3])


def test_at_lambda_1_advantages_are_returns_minus_values_and_at_0_one_step_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(4, 6, dtype=torch.bool)
    zeros = torch.zeros(4, dtype=torch.float64)
    found, returns = gae(rewards, values, mask, zeros, gamma=0.9, lam=1.0)
    plain = discounted_returns(rewards, mask, gamma=0.9)
    torch.testing.assert_close(returns, plain)
    torch.testing.assert_close(found, plain - values)
    one_step, _ = gae(rewards, values, mask, zeros, gamma=0.9, lam=0.0)
    after = torch.cat([values[:, 1:], zeros.unsqueeze(1)], 1)
    torch.testing.assert_close(one_step, rewards + 0.9 * after - values)


def test_discounted_returns_by_hand() -> None:
    mask = torch.tensor([[True, True, True, False]])
    found = discounted_returns(torch.tensor([[0.0, 0.0, 1.0, 9.0]]), mask, gamma=0.5)
    assert found.tolist() == [[0.25, 0.5, 1.0, 0.0]]


def test_a_row_that_is_not_terminal_ends_with_its_bootstrap_value() -> None:
    found, _ = gae(
        torch.zeros(1, 1), torch.tensor([[0.5]]), ALL[:, :1], torch.tensor([2.0]), gamma=0.9, lam=1.0
    )
    assert found.item() == pytest.approx(0.9 * 2 - 0.5)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("filler", [0.0, 7.0, NAN])
def test_masked_positions_and_padding_hand_the_state_through(name: str, filler: float) -> None:
    """A tool's tokens inside a response, and what stands there, change nothing for the others."""
    hole = torch.tensor([[True, True, False, False, True, False]])
    values = torch.tensor([[0.5, 0.6, filler, filler, 0.7, filler]])
    rewards = torch.tensor([[0.0, 0.0, filler, filler, 1.0, filler]])
    kept, kept_returns = estimate(name, REWARDS, VALUES, ALL)
    found, returns = estimate(name, rewards, values, hole, filler)
    torch.testing.assert_close(found[hole], kept[0], rtol=0, atol=0)
    torch.testing.assert_close(returns[hole], kept_returns[0], rtol=0, atol=0)
    assert found[~hole].tolist() == [0, 0, 0]
    assert returns[~hole].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_a_row_without_a_counted_token_gets_zeros(name: str) -> None:
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    found, returns = estimate(name, REWARDS, VALUES, nothing, NAN)
    assert found.tolist() == returns.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_advantages_carry_no_gradient_to_the_critic(name: str) -> None:
    values = VALUES.clone().requires_grad_(True)
    found, returns = estimate(name, REWARDS, values, ALL)
    assert not found.requires_grad
    assert not returns.requires_grad
