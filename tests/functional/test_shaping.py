"""Shaping scores: the order, what moves a row's total and what never does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rein.functional.rewards import (
    PLACEMENTS,
    keep_places,
    length_cost,
    missing_end,
    normalize,
    overlong,
    repetition_cost,
    score_statistics,
    shape_scores,
    spread_exponentially,
    spread_uniformly,
)

T, F = True, False
MASK = torch.tensor([[T, F, T, T], [T, T, F, F], [F, F, F, F]])
SCORES = torch.tensor([3.0, -2.0, 5.0])


def place(name: str, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    options = {"decay": 0.5} if name == "exponential" else {}
    return PLACEMENTS[name](scores, mask, **options)


def test_a_score_spread_uniformly_and_by_decay() -> None:
    assert spread_uniformly(SCORES, MASK).tolist() == [[1, 0, 1, 1], [-1, -1, 0, 0], [0, 0, 0, 0]]
    found = spread_exponentially(SCORES, MASK, decay=0.5)
    expected = [[3 / 7, 0, 6 / 7, 12 / 7], [-2 / 3, -4 / 3, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    with pytest.raises(ValueError, match=r"decay 0 must lie in \(0, 1\]"):
        spread_exponentially(SCORES, MASK, decay=0)


@pytest.mark.parametrize("name", PLACEMENTS)
@given(scores=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_placing_never_moves_a_row_s_total(name: str, scores: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(len(scores), 40, generator=generator) < 0.5
    mask[:, 3] = True
    placed = place(name, torch.tensor(scores), mask)
    torch.testing.assert_close(placed.sum(1), torch.tensor(scores), rtol=1e-5, atol=1e-6)
    assert (placed[~mask] == 0).all()


def test_a_long_response_with_a_steep_decay_keeps_its_total() -> None:
    mask = torch.ones(1, 5000, dtype=torch.bool)
    assert spread_exponentially(torch.tensor([1.0]), mask, decay=0.01).sum().item() == pytest.approx(1)


def test_stored_places_are_kept_and_only_the_last_counted_token_takes_the_rest() -> None:
    stored = torch.tensor([[1.0, 9.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert keep_places(stored, SCORES, MASK).tolist() == [[1, 0, 0, 2], [0, -2, 0, 0], [0, 0, 0, 0]]
    more = keep_places(stored, SCORES + 0.5, MASK)
    assert more.tolist() == [[1, 0, 0, 2.5], [0, -1.5, 0, 0], [0, 0, 0, 0]]
    scaled = keep_places(stored, (SCORES - 1) / 2, MASK, statistics=(1.0, 2.0))
    assert scaled.tolist() == [
        [0.5, 0, 0, 0.5],
        [0, -1.5, 0, 0],
        [0, 0, 0, 0],
    ]  # 3 / 2, less 1 / 2 at the end


def test_scores_are_normalized_by_the_whole_dataset() -> None:
    statistics = score_statistics(torch.tensor([0.0, 0.0, 4.0, 4.0]))
    assert statistics == (2, 2)
    assert normalize(torch.tensor([4.0, 2.0]), mean=2, std=2).tolist() == [1, 0]
    assert normalize(torch.tensor([0.95, 0.95]), mean=0.95, std=1e-9).abs().max() < 1e-6
    assert score_statistics(torch.zeros(0)) == (0, 1)


def test_an_answer_that_did_not_end_pays() -> None:
    assert missing_end(torch.tensor([T, F]), penalty=0.5).tolist() == [0, -0.5]


def test_overlong_answers_pay_by_how_far_they_are_in_the_buffer() -> None:
    """At most 20 tokens, a buffer of 8: free up to 12, the whole factor from 20 on."""
    lengths = torch.tensor([5, 12, 14, 20, 31])
    assert overlong(lengths, max_length=20, buffer=8, factor=2.0).tolist() == [0, 0, -0.5, -2, -2]
    for buffer in (0, 21):
        with pytest.raises(ValueError, match="must lie between 1 and max_length 20"):
            overlong(lengths, max_length=20, buffer=buffer)


def test_length_and_repetition_cost() -> None:
    assert length_cost(torch.tensor([3, 10]), per_token=0.5, free=6).tolist() == [0, -2]
    ids = torch.tensor([[5, 6, 5, 6, 5, 9], [1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7]])
    mask = torch.tensor([[T, T, T, T, T, F], [T] * 6, [T, F, F, F, F, F]])
    # bigrams 56 65 56 65: half of them stood there before; the last row has one token
    assert repetition_cost(ids, mask, penalty=2.0, n=2).tolist() == [-1, 0, 0]


def test_the_order_is_normalize_clip_terms() -> None:
    """(9 - 1) / 2 = 4, cut to 2, minus a penalty that no clip sees."""
    found = shape_scores(
        torch.tensor([9.0, 1.0]),
        statistics=(1.0, 2.0),
        clip_range=(-2.0, 2.0),
        terms=[torch.tensor([-3.0, 0.0]), torch.tensor([0.0, -5.0])],
    )
    assert found.tolist() == [-1, -5]
    assert shape_scores(torch.tensor([9.0])).tolist() == [9]


def test_shaping_leaves_what_it_is_given_alone() -> None:
    scores = torch.tensor([9.0, 1.0, 2.0])
    shape_scores(scores, statistics=(1.0, 2.0), clip_range=(-1.0, 1.0), terms=[scores])
    for name in PLACEMENTS:
        place(name, scores, MASK)
    assert scores.tolist() == [9, 1, 2]
