"""Intervals and estimators against numbers worked out apart."""

import itertools
import math

import pytest
import torch

from rein.functional.statistics import (
    explained_variance,
    paired_bootstrap,
    pass_at_k,
    ratio_of_sums,
    wilson,
)


def test_the_bootstrap_interval_is_that_of_the_normal_for_many_problems() -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.rand(2000, generator=generator)
    after = before + 0.1 + 0.5 * torch.randn(2000, generator=generator)
    difference = (after - before).double()
    error = float(difference.std()) / math.sqrt(2000)
    low, high = paired_bootstrap(before, after)
    # the 2.5 % quantile of 10,000 draws has an error of .027 standard errors; four are allowed
    assert low == pytest.approx(float(difference.mean()) - 1.96 * error, abs=0.11 * error)
    assert high == pytest.approx(float(difference.mean()) + 1.96 * error, abs=0.11 * error)


def test_pairing_removes_what_both_sides_share() -> None:
    before = torch.linspace(0, 100, 50)
    low, high = paired_bootstrap(before, before + 0.25)
    assert low == pytest.approx(0.25, abs=1e-5)
    assert high == pytest.approx(0.25, abs=1e-5)


def test_the_bootstrap_of_two_problems_has_the_three_possible_means() -> None:
    assert paired_bootstrap(torch.zeros(2), torch.tensor([0.0, 1.0])) == (0.0, 1.0)
    assert paired_bootstrap(torch.zeros(2), torch.tensor([0.0, 1.0]), confidence=0.4) == (0.5, 0.5)


def test_the_same_seed_gives_the_same_interval_and_chunks_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(2)
    before, after = torch.rand(2, 300, generator=generator)
    first = paired_bootstrap(before, after, seed=3)
    assert paired_bootstrap(before, after, seed=3) == first
    assert paired_bootstrap(before, after, seed=4) != first
    monkeypatch.setattr("rein.functional.statistics.DRAWS_AT_ONCE", 7 * 300)
    assert paired_bootstrap(before, after, seed=3) == first


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(5)
    hits = 0
    for seed in range(200):
        before = (torch.rand(100, generator=generator) < 0.4).float()
        after = (torch.rand(100, generator=generator) < 0.6).float()
        low, high = paired_bootstrap(before, after, resamples=500, seed=seed)
        hits += low <= 0.2 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_no_problem_or_unequal_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="one score per problem"):
        paired_bootstrap(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="one score per problem"):
        paired_bootstrap(torch.zeros(3), torch.zeros(2))


def test_wilson_gives_the_textbook_numbers() -> None:
    assert wilson(10, 20) == pytest.approx((0.299298, 0.700702), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((0.722467, 1.0), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_the_mean() -> None:
    returns = torch.tensor([[1.0, 2.0, 3.0, float("nan")]])
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask) == pytest.approx(0.0, abs=1e-4)
    # R - V = [1, 0, 2]: its variance is that of R
    worse = torch.tensor([[0.0, 2.0, 1.0, 9.0]])
    assert explained_variance(worse, returns, mask) == pytest.approx(1 - 1 / (1 + 1e-5), abs=1e-9)
    # verl: 1 - var(R - V) / (var(R) + 1e-5), R - V = [0, 1, 3], var 7/3
    assert explained_variance(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), returns, mask) == pytest.approx(
        1 - (7 / 3) / (1 + 1e-5)
    )


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 3), (5, 5), (8, 4)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(n: int, k: int) -> None:
    for correct in range(n + 1):
        draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        share = sum(any(draw) for draw in draws) / len(draws)
        assert float(pass_at_k(torch.tensor([correct]), n, k)) == pytest.approx(share, abs=1e-12)


def test_pass_at_more_than_the_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="k=9 of n=8"):
        pass_at_k(torch.tensor([1]), 8, 9)


def test_a_ratio_of_sums_counts_tokens_and_draws_rows() -> None:
    mean, interval = ratio_of_sums(torch.tensor([2.0, 9.0]), torch.tensor([1.0, 3.0]))
    assert mean == 11 / 4
    assert interval == (2.0, 3.0)  # both rows the first, or both the second
    mean, interval = ratio_of_sums(torch.full((50,), 6.0), torch.full((50,), 3.0))
    assert (mean, interval.low, interval.high) == (2, 2, 2)
    with pytest.raises(ValueError, match="no token"):
        ratio_of_sums(torch.zeros(3), torch.zeros(3))
