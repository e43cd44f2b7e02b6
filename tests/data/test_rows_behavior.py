"""Claims about who wrote a stored response, at which temperature, and what it scored."""

from typing import Any

import numpy as np
import pytest
from data_made import Load, text_ids

from rein.config.recipe import Data
from rein.data.rows_trajectories import (
    CUT_SAMPLING,
    GREEDY,
    LOOSE_LOG_PROBS,
    NO_LOG_PROBS,
    NO_TEMPERATURE,
)

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}


def test_behavior_is_known_where_log_probs_are_stored_and_unknown_else(load: Load, data: Data) -> None:
    stored = [-1.0, 5e-5]  # rounding may leave a log-prob a hair above 0
    (row,) = load(behavior_log_probs=stored).rows
    np.testing.assert_array_equal(row.behavior_log_probs, np.array(stored, np.float32))
    loaded = load()
    assert loaded.rows[0].behavior_log_probs is None
    assert f"rows.jsonl: 1 of 2 rows: {NO_LOG_PROBS}" in loaded.notes


def test_behavior_unknown_ignores_the_column_and_stored_insists_on_it(load: Load, data: Data) -> None:
    unknown = data.model_copy(update={"behavior": "unknown"})
    assert load(recipe=unknown, behavior_log_probs=[7.0]).rows[0].behavior_log_probs is None
    stored = data.model_copy(update={"behavior": "stored"})
    (reject,) = load(recipe=stored).rejects
    assert reject.reason == "behavior_log_probs is null and data.behavior is stored"


def test_log_probs_beside_text_belong_to_no_token(load: Load, data: Data) -> None:
    """As many numbers as the text has tokens prove nothing: other tokens may have been sampled."""
    text_only = {"response_ids": ..., "response": "2", "behavior_log_probs": [-1.0, -1.0]}
    loaded = load(**text_only)
    assert loaded.rows[0].behavior_log_probs is None
    assert f"rows.jsonl: 1 of 2 rows: {LOOSE_LOG_PROBS}" in loaded.notes
    (reject,) = load(recipe=data.model_copy(update={"behavior": "stored"}), **text_only).rejects
    assert reject.reason == "behavior_log_probs needs response_ids to belong to"


def test_tokens_that_do_not_count_may_have_any_log_prob(load: Load) -> None:
    (row,) = load(
        response_ids=[ONE, ONE, TWO, 1],
        response_mask=[True, False, False, True],
        behavior_log_probs=[-1.0, None, 3.0, -2.0],
    ).rows
    np.testing.assert_array_equal(row.behavior_log_probs, np.array([-1.0, 0.0, 3.0, -2.0], np.float32))


def test_the_stored_temperature_is_kept(load: Load) -> None:
    (row,) = load(temperature=0.6).rows
    assert row.temperature == 0.6


def test_temperature_0_computes_at_1_with_unknown_behavior_and_says_so(load: Load) -> None:
    loaded = load(temperature=0, behavior_log_probs=[-1.0, -1.0])
    assert (loaded.rows[0].temperature, loaded.rows[0].behavior_log_probs) == (1.0, None)
    assert f"rows.jsonl: 1 of 2 rows: {GREEDY}" in loaded.notes


@pytest.mark.parametrize("temperature", [None, ...])
def test_a_temperature_that_is_not_stored_is_1_and_said(load: Load, temperature: Any) -> None:
    loaded = load(temperature=temperature, behavior_log_probs=[-1.0, -1.0])
    assert loaded.rows[0].temperature == 1.0
    assert loaded.rows[0].behavior_log_probs is not None
    assert f"rows.jsonl: 1 of 2 rows: {NO_TEMPERATURE}" in loaded.notes


def test_log_probs_of_cut_sampling_are_warned_of(load: Load) -> None:
    loaded = load(top_p=0.9, behavior_log_probs=[-1.0, -1.0])
    assert loaded.rows[0].top_p == 0.9
    assert f"rows.jsonl: 1 of 2 rows: {CUT_SAMPLING}" in loaded.notes


@pytest.mark.parametrize(("stored", "score"), [(2, 2.0), (True, 1.0), (-0.5, -0.5), (0, 0.0)])
def test_a_score_is_a_number(load: Load, stored: Any, score: float) -> None:
    assert load(score=stored, scored=True).rows[0].score == score


def test_scores_placed_on_tokens_sum_to_the_score(load: Load) -> None:
    (row,) = load(token_level_scores=[0.25, 0.5], scored=True).rows
    assert row.score == 0.75
    np.testing.assert_array_equal(row.token_level_scores, [0.25, 0.5])
    assert load(token_level_scores=[0.25, 0.5], score=0.75, scored=True).rows[0].score == 0.75


def test_a_row_without_a_score_is_rejected_only_where_scores_are_needed(load: Load) -> None:
    assert load(score=None).rows[0].score is None
    assert [r.reason for r in load(score=None, scored=True).rejects] == ["score is null"]


def test_rows_of_one_prompt_share_a_group(load: Load) -> None:
    assert load().rows[0].group == "1+1="
    assert load(group="problem 7").rows[0].group == "problem 7"
    assert load(group=7).rows[0].group == "7"
    long = load(prompt="1" * 60, recipe=Data()).rows[0], load(prompt="1" * 300, recipe=Data()).rows[0]
    assert long[0].group == "1" * 60
    assert len(long[1].group) == 32
