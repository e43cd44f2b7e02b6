"""Sums, means and whitening against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from rein.functional.masked import masked_mean, masked_sum, masked_var, whiten

NAN, INF = math.nan, math.inf
MASK = torch.tensor([[True, True, False], [True, False, False]])
CLEAN = torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]])
DIRTY = torch.tensor([[1.0, 2.0, NAN], [6.0, INF, -INF]])


@pytest.mark.parametrize("values", [CLEAN, DIRTY], ids=["zeros", "nan and infinity"])
def test_what_stands_at_masked_positions_changes_nothing(values: Tensor) -> None:
    assert masked_sum(values, MASK).item() == 9
    assert masked_mean(values, MASK).item() == 3
    assert masked_sum(values, MASK, 1).tolist() == [3, 6]
    assert masked_mean(values, MASK, 1).tolist() == [1.5, 6]
    assert masked_var(values, MASK).item() == pytest.approx(7)  # (4 + 1 + 9) / 2
    assert masked_var(values, MASK, unbiased=False).item() == pytest.approx(14 / 3)
    scale = math.sqrt(7)
    expected = torch.tensor([[-2 / scale, -1 / scale, 0.0], [3 / scale, 0.0, 0.0]])
    torch.testing.assert_close(whiten(values, MASK), expected)


def test_the_mean_of_nothing_is_zero_and_has_a_graph() -> None:
    values = torch.full((2, 3), NAN, requires_grad=True)
    mean = masked_mean(values, torch.zeros(2, 3, dtype=torch.bool))
    mean.backward()
    assert mean.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0] * 3] * 2


def test_no_epsilon_shows_in_a_mean() -> None:
    third = torch.full((1, 3), 1e-7, dtype=torch.float64)
    assert masked_mean(third, torch.tensor([[True, False, False]])).item() == 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "kept", [[0.95] * 7, [0.1] * 3, [1 / 3] * 1000, [1e6 / 3] * 17, [0.0] * 5, [-2.5], []], ids=str
)
def test_values_without_spread_whiten_to_zero(kept: list[float], dtype: torch.dtype) -> None:
    values = torch.tensor([[NAN, *kept]], dtype=dtype)
    mask = torch.tensor([[False] + [True] * len(kept)])
    assert whiten(values, mask).tolist() == [[0.0] * (1 + len(kept))]


def test_a_small_spread_is_still_a_spread() -> None:
    values = torch.tensor([[0.95, 0.95, 0.96]])
    found = whiten(values, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([[-1.0, -1.0, 2.0]]) / math.sqrt(3), atol=2e-3, rtol=0)


def test_whitening_is_over_the_whole_batch_not_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    values = 5 + 3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < 0.6
    kept = whiten(values, mask)[mask]
    assert kept.mean().item() == pytest.approx(0, abs=1e-12)
    assert kept.var().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(kept, (values[mask] - values[mask].mean()) / values[mask].std())
