"""Repetition of answers."""

import pytest
import torch

from rein.functional.evaluation import repetition, wins


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4, 5, 6], 0.0),
        ([1, 1, 1, 1, 1, 1, 1], 0.75),  # four 4-grams, one distinct
        ([1, 2, 3, 4, 1, 2, 3, 4], 0.2),  # five 4-grams, four distinct
    ],
)
def test_repetition_is_the_share_of_fourgrams_seen_before(ids: list[int], share: float) -> None:
    assert repetition(torch.tensor(ids)) == pytest.approx(share)


def test_a_loop_repeats_nearly_everything() -> None:
    assert repetition(torch.tensor([7, 8] * 500)) > 0.99


def test_ties_are_half_a_win() -> None:
    before, after = torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.75])
    assert wins(before, after).tolist() == [1, 0.5, 0, 1]
