"""Advantages against hand answers: V-trace, Monte Carlo, and those of groups and baselines."""

import math

import pytest
import torch
from torch import Tensor

from rein.functional.advantages import (
    ESTIMATORS,
    INPUTS,
    WHITENED,
    gae,
    monte_carlo,
    reinforce_plus_plus,
    remax,
    trace_kept,
    vtrace,
)
from rein.functional.group_advantages import (
    grpo,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
    win_rate,
)
from rein.functional.masked import whiten

T, F = True, False
# Rows 0, 2 answer one prompt, rows 1, 3, 4 another, row 5 a third; the reward lies on the last counted token.
GROUPS = torch.tensor([7, 2, 7, 2, 2, 9])
MASK = torch.tensor([[T, F, F], [T, T, F], [T, T, T], [T, F, F], [F, T, T], [T, T, F]])
SCORES = torch.tensor([1.0, 0.0, 3.0, 1.0, 1.0, 5.0])
REWARDS = torch.zeros(6, 3)
REWARDS[torch.arange(6), torch.tensor([0, 1, 2, 0, 2, 1])] = SCORES


def per_row(found: Tensor, mask: Tensor = MASK) -> list[float]:
    """The number of each row, which is the same at its counted tokens and 0 elsewhere."""
    rows = []
    for values, counts in zip(found, mask, strict=True):
        assert (values[~counts] == 0).all()
        assert len(set(values[counts].tolist())) == 1
        rows.append(values[counts][0].item())
    return rows


def test_grpo_by_hand() -> None:
    """Groups 1, 3 and 0, 1, 1: means 2 and 2/3, standard deviations sqrt 2 and sqrt(1/3); alone: as it is."""
    found, _ = grpo(REWARDS, MASK, GROUPS)
    a, b = math.sqrt(2) + 1e-6, math.sqrt(1 / 3) + 1e-6
    expected = [-1 / a, -2 / 3 / b, 1 / a, 1 / 3 / b, 1 / 3 / b, 5 / (1 + 1e-6)]
    assert per_row(found) == pytest.approx(expected, rel=1e-6)
    plain, _ = grpo(REWARDS, MASK, GROUPS, by_std=False)
    assert per_row(plain) == pytest.approx([-1, -2 / 3, 1, 1 / 3, 1 / 3, 5])


def test_rloo_stands_each_answer_against_the_mean_of_the_others() -> None:
    assert per_row(rloo(REWARDS, MASK, GROUPS)[0]) == pytest.approx([-2, -1, 2, 0.5, 0.5, 5])


def test_the_group_baseline_of_reinforce_plus_plus() -> None:
    found, _ = reinforce_plus_plus_baseline(REWARDS, MASK, GROUPS)
    assert per_row(found) == pytest.approx([-1, -2 / 3, 1, 1 / 3, 1 / 3, 5])
    assert "reinforce_plus_plus_baseline" in WHITENED


def test_opo_weighs_the_baseline_by_length() -> None:
    """Lengths 1, 3 with rewards 1, 3: 10 / 4. Lengths 2, 1, 2 with 0, 1, 1: 3 / 5."""
    found, _ = opo(REWARDS, MASK, GROUPS)
    assert per_row(found) == pytest.approx([-1.5, -0.6, 0.5, 0.4, 0.4, 5])


def test_the_win_rate_is_centered_and_zero_for_a_row_alone() -> None:
    def wins(gap: float) -> float:
        return 1 / (1 + math.exp(-gap))

    found = per_row(win_rate(REWARDS, MASK, GROUPS)[0])
    assert found[2] == pytest.approx((0.5 + wins(2)) / 2 - 0.5)
    assert found[0] == pytest.approx(-found[2])
    assert found[1] == pytest.approx((0.5 + 2 * wins(-1)) / 3 - 0.5)
    assert found[5] == 0
    sharp = per_row(win_rate(REWARDS, MASK, GROUPS, scale=1e-3)[0])
    assert sharp[2] == pytest.approx(0.25)


def test_remax_by_hand() -> None:
    """Rewards to go minus the greedy answer's reward."""
    rewards = torch.tensor([[0.5, 9.0, 1.0]])
    found, returns = remax(rewards, torch.tensor([[T, F, T]]), torch.tensor([0.25]))
    assert found.tolist() == [[1.25, 0, 0.75]]
    assert returns.tolist() == [[1.5, 0, 1.0]]


def test_reinforce_plus_plus_is_the_discounted_return() -> None:
    found, returns = reinforce_plus_plus(
        torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[T, F, T]]), gamma=0.5
    )
    assert found.tolist() == returns.tolist() == [[0.5, 0, 1.0]]


def test_monte_carlo_is_the_return_minus_the_value() -> None:
    values = torch.tensor([[0.5, 0.25]])
    both = torch.ones(1, 2, dtype=torch.bool)
    found, returns = monte_carlo(torch.tensor([[1.0, 2.0]]), values, both, torch.tensor([4.0]), gamma=0.5)
    assert returns.tolist() == [[1 + 0.5 * (2 + 2), 4]]
    assert found.tolist() == [[2.5, 3.75]]


def vtrace_of(rho: list[float], lam: float = 1.0, threshold: float = 2.0) -> tuple[list[float], list[float]]:
    """V = 1/2 everywhere, reward 1 at the end, gamma 1."""
    old = torch.tensor([rho]).log()
    shape = old.shape
    rewards = torch.zeros(shape)
    rewards[0, -1] = 1
    found, targets = vtrace(
        rewards,
        torch.full(shape, 0.5),
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(1),
        old,
        torch.zeros(shape),
        gamma=1.0,
        lam=lam,
        threshold=threshold,
    )
    return found[0].tolist(), targets[0].tolist()


def test_vtrace_by_hand() -> None:
    """rho 1/2, 4: v_2 = 1/2 + 2 (1 - 1/2) = 3/2, cut at 2; v_1 = 1/2 + 0 + 1/2 * 1 = 1; A_1 = 3/2 - 1/2."""
    found, targets = vtrace_of([0.5, 4.0])
    assert targets == pytest.approx([1.0, 1.5])
    assert found == pytest.approx([1.0, 0.5])  # the last: 1 - 1/2, its own rho is the loss's business


def test_the_trace_of_vtrace_is_cut_at_1_and_by_lambda() -> None:
    """rho 4, 1/2: v_2 = 1/2 + 1/2 * 1/2 = 3/4, passed on with min(4, 1) lam."""
    assert vtrace_of([4.0, 0.5])[1] == pytest.approx([0.75, 0.75])
    assert vtrace_of([4.0, 0.5], lam=0.5)[1] == pytest.approx([0.625, 0.75])
    assert vtrace_of([4.0, 0.5], lam=0.5)[0] == pytest.approx([0.25, 0.5])


def test_where_behavior_is_the_actor_the_targets_of_vtrace_are_those_of_gae() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values, log_probs = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=generator) < 0.7
    end = torch.randn(5, generator=generator, dtype=torch.float64)
    options = {"gamma": 0.95, "lam": 0.8}
    _, targets = vtrace(rewards, values, mask, end, log_probs, log_probs, threshold=1.0, **options)
    _, returns = gae(rewards, values, mask, end, **options)
    torch.testing.assert_close(targets, returns)
    at_1, _ = vtrace(rewards, values, mask, end, log_probs, log_probs, gamma=0.95, lam=1.0, threshold=1.0)
    torch.testing.assert_close(at_1, gae(rewards, values, mask, end, gamma=0.95, lam=1.0)[0])


def test_what_is_kept_of_the_trace_is_the_mean_of_the_rows_products() -> None:
    old = torch.tensor([[0.5, 4.0, 9.0], [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]]).log()
    mask = torch.tensor([[T, T, F], [T, T, T], [F, F, F]])
    assert trace_kept(old, torch.zeros(3, 3), mask) == pytest.approx((0.5 + 1) / 2)
    assert trace_kept(old, torch.zeros(3, 3), torch.zeros(3, 3, dtype=torch.bool)) == 0


GROUPED = sorted(name for name, words in INPUTS.items() if "groups" in words)


@pytest.mark.parametrize("name", GROUPED)
def test_equal_rewards_teach_nothing_even_once_they_are_spread_over_tokens(name: str) -> None:
    """7 answers of reward .95 spread over 1 to 7 tokens: the sums differ by rounding, and that is no
    spread."""
    lengths = torch.arange(1, 8)
    mask = torch.arange(7) < lengths.unsqueeze(1)
    rewards = (torch.full((7, 7), 0.95) / lengths.unsqueeze(1)).where(mask, 0)
    assert len(set(rewards.sum(1).tolist())) > 1
    found, _ = ESTIMATORS[name](rewards, mask, torch.zeros(7, dtype=torch.long))
    assert (found == 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_which_numbers_the_groups_have_does_not_matter(name: str) -> None:
    found, _ = ESTIMATORS[name](REWARDS, MASK, GROUPS)
    renamed, _ = ESTIMATORS[name](REWARDS, MASK, GROUPS * -1000 + 3)
    assert torch.equal(found, renamed)


def test_seven_equal_scores_and_an_outlier_by_hand() -> None:
    """[0, .95 x 7]: the baseline of the first is exactly .95."""
    scores = torch.tensor([0.0] + [0.95] * 7).unsqueeze(1)
    mask, one = torch.ones(8, 1, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    found, _ = rloo(scores, mask, one)
    assert found[0].item() == pytest.approx(-0.95, abs=1e-7)
    assert found[1:].flatten().tolist() == pytest.approx([0.95 / 7] * 7, abs=1e-7)


def test_every_estimator_says_what_it_takes_and_who_whitens() -> None:
    assert set(INPUTS) == set(ESTIMATORS)
    assert set(ESTIMATORS) >= WHITENED
    found, _ = reinforce_plus_plus(REWARDS, MASK, gamma=1.0)
    assert whiten(found, MASK)[MASK].mean().item() == pytest.approx(0, abs=1e-6)
