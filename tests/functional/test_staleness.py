"""What raw weights say of stored data: effective sample, shares, means with intervals, the tail."""

import math

import pytest
import torch

from rein.functional.staleness import (
    effective_sample_size,
    largest_share,
    mean_weight,
    pareto_k,
    staleness,
)


def test_the_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(torch.tensor([1.0, 1.0, 1.0])) == pytest.approx(1)
    assert effective_sample_size(torch.tensor([3.0, 1.0])) == pytest.approx(16 / 10 / 2)
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.zeros(3)) == 0
    assert effective_sample_size(torch.zeros(0)) == 0
    assert largest_share(torch.tensor([3.0, 1.0])) == 0.75
    assert largest_share(torch.zeros(3)) == 0


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_the_tail_of_a_pareto_distribution_is_found(shape: float) -> None:
    """w = u^-k has tail index k exactly."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(20000, generator=generator, dtype=torch.float64)
    assert pareto_k(-shape * uniform.log()) == pytest.approx(shape, abs=0.12)


def test_the_shape_has_no_unit_and_no_order() -> None:
    generator = torch.Generator().manual_seed(1)
    log_w = torch.randn(500, generator=generator, dtype=torch.float64) * 2
    found = pareto_k(log_w)
    assert pareto_k(log_w + 40) == pytest.approx(found)
    assert pareto_k(log_w.flip(0)) == pytest.approx(found, abs=1e-12)
    assert pareto_k(log_w * 3) > found > 0.5


def test_a_tail_that_cannot_be_fitted_is_not_a_number_and_equal_weights_are_best() -> None:
    assert math.isnan(pareto_k(torch.arange(20.0)))
    assert math.isnan(pareto_k(torch.zeros(0)))
    assert pareto_k(torch.full((100,), 3.0)) == 0
    one_rules = torch.zeros(100)
    one_rules[0] = 50.0
    assert math.isnan(pareto_k(one_rules))


def test_numbers_far_apart_do_not_break_the_fit() -> None:
    assert math.isfinite(pareto_k(torch.linspace(-1e4, 1e4, 1000)))


def test_the_interval_of_the_mean_weight_covers_it_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        log_w = 0.5 * torch.randn(200, generator=generator, dtype=torch.float64) - 0.125  # mean weight 1
        mean, interval = mean_weight(log_w, resamples=200)
        assert interval.low < mean < interval.high
        covered += interval.low < 1 < interval.high
    assert covered >= 85


def test_the_interval_is_the_same_again_and_lies_below_1_where_the_actor_has_left() -> None:
    log_w = torch.linspace(-5, 0, 300)
    mean, interval = mean_weight(log_w)
    assert mean_weight(log_w) == (mean, interval)
    assert interval.high < 1


def test_tails_are_of_counted_tokens() -> None:
    """999 tokens at distance 0, one at 7; masked ones say anything."""
    old = torch.zeros(2, 1000)
    old[0, 3] = -7.0
    old[1] = math.nan
    mask = torch.tensor([[True], [False]]).expand(2, 1000)
    found = staleness(old, torch.zeros(2, 1000), mask)
    assert found["log_weight_max"] == 7
    assert found["log_weight_p99"] == 0
    assert found["raw_outside_half_to_two"] == pytest.approx(0.001)
    assert found["raw_max"] == 1
    assert found["seq_mean"] == pytest.approx(math.exp(-7))
    assert found["seq_ess"] == 1  # one row
    assert found["seq_geometric_mean"] == pytest.approx(math.exp(-0.007))
    assert "seq_pareto_k" not in found


def test_nothing_that_counts_says_nothing() -> None:
    assert staleness(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)) == {}


def test_log_ratios_far_beyond_any_float_give_finite_numbers() -> None:
    old = torch.tensor([[1e4, 1e4], [-1e4, -1e4], [0.0, 1e4]])
    found = staleness(old, torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool))
    assert all(math.isfinite(value) for value in found.values())
    assert found["seq_ess"] == pytest.approx(1 / 3)
    assert found["seq_max_share"] == 1
