"""Importance weights the right way up, on the right pair, detached; and what they say of the data."""

import math

import pytest
import torch
from torch import Tensor

from rein.functional.off_policy import diagnostics
from rein.functional.weights import importance_weights

ONE = torch.ones(1, 1, dtype=torch.bool)


def applied(old: Tensor, behavior: Tensor, mask: Tensor = ONE, threshold: float = 2.0) -> Tensor:
    return importance_weights(old, behavior, mask, level="token", threshold=threshold).applied


def weight(old: float, behavior: float, threshold: float = 2.0) -> float:
    return applied(torch.tensor([[old]]), torch.tensor([[behavior]]), threshold=threshold).item()


def test_the_weight_is_old_over_behavior_cut_at_the_threshold() -> None:
    assert weight(-1.0, -2.0) == 2.0  # e, cut
    assert weight(-1.0, -2.0, threshold=10.0) == pytest.approx(math.e)
    assert weight(-1.0, -0.5) == pytest.approx(0.6065, abs=5e-5)
    assert weight(-1.0, -1.0) == 1.0


def test_weights_have_no_lower_bound_and_never_overflow() -> None:
    assert weight(-15.0, 0.0) == pytest.approx(math.exp(-15))
    assert weight(0.0, -500.0, threshold=1e20) == pytest.approx(math.exp(20))


def test_weights_are_detached() -> None:
    old = torch.tensor([[-1.0]], requires_grad=True)
    assert not applied(old, torch.tensor([[-2.0]])).requires_grad


def test_masked_tokens_weigh_nothing_whatever_stands_there() -> None:
    mask = torch.tensor([[True, False, False]])
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    behavior = torch.tensor([[-1.0, math.nan, -math.inf]])
    assert applied(old, behavior, mask).tolist() == [[1, 0, 0]]
    said = diagnostics(old, behavior, mask, threshold=2.0)
    assert said["rollout_corr/rollout_is_mean"] == 1
    assert said["rollout_corr/rollout_is_max"] == 1
    assert said["rollout_corr/kl"] == 0


def test_the_diagnostics_are_of_the_raw_weights() -> None:
    """Weights 4, 1 in one row and 1/2 in the other; row products 4 and 1/2; cut at 2 they are 2, 1, 1/2."""
    log = math.log
    old = torch.tensor([[log(4), 0.0], [log(0.5), 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    said = diagnostics(old, torch.zeros(2, 2), mask, threshold=2.0)
    assert said["rollout_corr/raw_mean"] == pytest.approx(5.5 / 3)
    assert said["rollout_corr/raw_max"] == pytest.approx(4)
    assert said["rollout_corr/raw_ess"] == pytest.approx(5.5**2 / 17.25 / 3)
    assert said["rollout_corr/raw_max_share"] == pytest.approx(4 / 5.5)
    assert said["rollout_corr/seq_mean"] == pytest.approx(2.25)
    assert said["rollout_corr/seq_max_share"] == pytest.approx(4 / 4.5)
    assert said["rollout_corr/rollout_is_mean"] == pytest.approx(3.5 / 3)
    assert said["rollout_corr/rollout_is_max"] == pytest.approx(2)
    assert said["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(3.5**2 / 5.25 / 3)
    assert said["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert said["rollout_corr/kl"] == pytest.approx(-(log(4) + log(0.5)) / 3)
    assert said["rollout_corr/seq_ess"] == pytest.approx(4.5**2 / (16 + 0.25) / 2)


def test_the_effective_sample_is_all_rows_when_they_weigh_the_same_and_one_when_one_rules() -> None:
    mask = torch.ones(4, 300, dtype=torch.bool)
    behavior = torch.full((4, 300), -1.0)
    same = diagnostics(behavior + 1.0, behavior, mask, threshold=2.0)  # row weights of e^300
    assert same["rollout_corr/seq_ess"] == pytest.approx(1)
    ruled = behavior.clone()
    ruled[0] += 5
    assert diagnostics(ruled, behavior, mask, threshold=2.0)["rollout_corr/seq_ess"] == pytest.approx(0.25)
