"""What a recipe's reward_manager makes of stored scores: each key alone, their order, and where it lands."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import random_trajectories

from rein.config.recipe import RewardManager
from rein.experience import padded
from rein.rewards.shaping import Shaped, shape
from rein.types import Trajectory

MADE = random_trajectories(6, seed=3, holes=True)
SCORES = [-9.0, 9.0, 0.5, 0.0, 1.0, 2.0]
ROWS = [row.with_score(score) for row, score in zip(MADE, SCORES, strict=True)]


def shaped(
    rows: list[Trajectory], statistics: tuple[float, float] | None = None, **keys: Any
) -> tuple[Shaped, torch.Tensor]:
    mask = padded([row.response_mask for row in rows], torch.bool)
    manager = RewardManager.model_validate(keys)
    return shape(rows, mask, manager, max_length=10, statistics=statistics), mask


def totals(rows: list[Trajectory], **keys: Any) -> list[float]:
    return shaped(rows, **keys)[0].token_level_scores.sum(1).tolist()


def with_tokens(row: Trajectory, scores: list[float]) -> Trajectory:
    size = len(scores)
    return dataclasses.replace(
        row,
        response_ids=np.arange(3, 3 + size),
        response_mask=np.ones(size, dtype=np.bool_),
        score=sum(scores),
        token_level_scores=np.array(scores, dtype=np.float32),
    )


def test_without_a_key_the_whole_score_is_on_the_last_counted_token() -> None:
    (placed, said), mask = shaped(ROWS)
    assert said == {}
    for i, score in enumerate(SCORES):
        last = int(mask[i].nonzero()[-1])
        assert placed[i, last] == score
        assert placed[i].abs().sum() == abs(score)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"placement": "last"},
        {"placement": "uniform"},
        {"placement": "exponential", "placement_decay": 0.5},
    ],
    ids=lambda keys: keys.get("placement", "as stored"),
)
def test_no_placement_moves_a_total_or_scores_a_token_that_does_not_count(keys: dict[str, Any]) -> None:
    rows = [*ROWS, with_tokens(MADE[0], [1.0, 0.0, -3.0])]
    (placed, _), mask = shaped(rows, **keys)
    assert placed.sum(1).tolist() == pytest.approx([*SCORES, -2.0])
    assert not placed[~mask].any()


def test_uniform_and_exponential_spread_over_the_counted_tokens() -> None:
    row = with_tokens(MADE[0], [0.0, 0.0, 7.0])
    spread = {"placement": "exponential", "placement_decay": 0.5}
    assert shaped([row], **spread)[0].token_level_scores.tolist() == [[1, 2, 4]]
    assert shaped([row], placement="uniform")[0].token_level_scores[0].tolist() == pytest.approx([7 / 3] * 3)


def test_scores_stored_on_tokens_stay_there_unless_a_placement_is_asked() -> None:
    row = with_tokens(MADE[0], [0.25, 0.0, -1.0, 0.5])
    assert shaped([row])[0].token_level_scores.tolist() == [[0.25, 0, -1, 0.5]]
    assert shaped([row], placement="last")[0].token_level_scores.tolist() == [[0, 0, 0, -0.25]]


def test_what_shaping_takes_from_scores_on_tokens_comes_off_the_last_one() -> None:
    row = dataclasses.replace(with_tokens(MADE[0], [2.0, 0.0, 2.0]), finish_reason="length")
    assert shaped([row], clip_range=[-3, 3])[0].token_level_scores.tolist() == [[2, 0, 1]]
    assert shaped([row], missing_eos_penalty=1.0)[0].token_level_scores.tolist() == [[2, 0, 1]]
    found, _ = shaped([row], statistics=(1.0, 2.0), normalize="dataset")  # (4 - 1) / 2
    assert found.token_level_scores.tolist() == [[1, 0, 0.5]]


def test_scores_are_normalised_by_the_dataset_and_only_when_asked() -> None:
    assert totals(ROWS, normalize="dataset", statistics=(1.0, 2.0)) == [(s - 1) / 2 for s in SCORES]
    assert totals(ROWS, statistics=(1.0, 2.0)) == SCORES


def test_only_an_answer_that_stopped_pays_nothing_for_its_end() -> None:
    rows = [
        dataclasses.replace(row, finish_reason=how)
        for row, how in zip(ROWS[:3], ("stop", "length", ""), strict=True)
    ]
    found, _ = shaped(rows, missing_eos_penalty=0.5)
    assert found.token_level_scores.sum(1).tolist() == [-9, 8.5, 0]
    assert found.metrics == {"shaping/missing_eos": pytest.approx(-1 / 3)}


def test_lengths_are_those_of_counted_tokens_and_the_limit_is_the_longest_response() -> None:
    row = with_tokens(MADE[0], [0.0] * 9)
    hole = dataclasses.replace(row, response_mask=np.array([True] * 6 + [False, True, True]))
    # at most 10 tokens, a buffer of 4: 9 counted tokens are 3/4 in, 8 are half
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0}
    assert totals([row, hole], overlong_buffer=buffer) == [-1.5, -1.0]
    assert totals([row, hole], overlong_buffer=buffer | {"enable": False}) == [0, 0]
    assert totals([row, hole], length_penalty=0.5, length_penalty_free=7) == [-1.0, -0.5]


def test_repetition_costs_its_share_of_ngrams() -> None:
    row = dataclasses.replace(with_tokens(MADE[0], [0.0] * 5), response_ids=np.array([5, 6, 5, 6, 5]))
    assert totals([row], repetition_penalty=2.0, repetition_ngram=2) == [-1]
    assert totals([row], repetition_penalty=2.0) == [0]  # two 4-grams, both new


def test_the_order_is_normalise_clip_terms() -> None:
    """(9 - 1) / 2 = 4, cut to 2, minus penalties that no clip sees."""
    row = dataclasses.replace(with_tokens(MADE[0], [0.0] * 4), token_level_scores=None, score=9.0)
    found, _ = shaped(
        [row],
        statistics=(1.0, 2.0),
        normalize="dataset",
        clip_range=[-2, 2],
        missing_eos_penalty=3.0,
        length_penalty=0.25,
        placement="last",
    )
    assert found.token_level_scores.tolist() == [[0, 0, 0, -2]]
    assert found.metrics == {"shaping/missing_eos": -3, "shaping/length": -1}
