"""Where a score lands, and what the KL takes from it."""

import pytest
import torch

from rein.functional.kl import KINDS
from rein.functional.rewards import last_position, place_on_last_token, subtract_kl

T, F = True, False
MASK = torch.tensor(
    [
        [T, T, T, F],  # t0, t1, EOS, PAD
        [T, T, T, T],  # cut off by the length
        [T, F, T, F],  # a tool's token inside
        [F, F, F, F],
    ]
)


def test_a_score_lands_on_the_last_counted_token_however_the_row_ended() -> None:
    placed = place_on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), MASK)
    assert placed.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 3, 0], [0, 0, 0, 0]]
    assert last_position(MASK).tolist() == [2, 3, 2, 0]


def test_kl_in_reward_by_hand_and_what_is_logged_stays_what_was_used() -> None:
    """KL .1, .2, coefficient .5, reward 1: rewards -.05, .9."""
    scores = torch.tensor([[0.0, 1.0, 0.0]])
    old, ref = torch.tensor([[-0.9, -0.8, -0.1]]), torch.tensor([[-1.0, -1.0, float("nan")]])
    mask = torch.tensor([[T, T, F]])
    rewards, kl = subtract_kl(scores, old, ref, mask, kl_coef=0.5, kind="k1")
    assert rewards.tolist()[0] == pytest.approx([-0.05, 0.9, 0])
    assert kl.tolist()[0] == pytest.approx([0.1, 0.2, 0])
    rewards.mul_(2)
    assert kl.tolist()[0] == pytest.approx([0.1, 0.2, 0])
    assert scores.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_coefficient_of_zero_leaves_the_scores(kind: str) -> None:
    scores = torch.tensor([[0.0, 1.0]])
    both = torch.ones(1, 2, dtype=torch.bool)
    rewards, _ = subtract_kl(scores, -scores, scores - 3, both, kl_coef=0.0, kind=kind)
    assert rewards.tolist() == scores.tolist()
