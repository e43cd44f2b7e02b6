"""Conversations with tools as responses: only what the assistant said counts, and each turn may score."""

from typing import Any

import numpy as np
import pytest
import torch
from data_made import Load, WriteParquet, text_ids

from rein.config.recipe import Data, RewardManager
from rein.data import schemas
from rein.data.loader import load_trajectories
from rein.data.parquet import write_rows
from rein.data.tokenize import Encoder
from rein.functional.advantages import gae
from rein.functional.masked import masked_mean, whiten
from rein.rewards.shaping import shape

ASKS = [{"role": "assistant", "content": "ab"}, {"role": "tool", "content": "7"}]
TALK = [*ASKS, {"role": "assistant", "content": "c"}]
BETWEEN = "\n(tool)7\n(assistant)"
MASK = [True] * 3 + [False] * len(BETWEEN) + [True] * 2


def of_talk(load: Load, chat: Encoder, **columns: Any) -> Any:
    return load(chat, response_ids=..., response=TALK, **columns)


def test_only_what_the_assistant_said_counts(load: Load, chat: Encoder) -> None:
    (row,) = of_talk(load, chat).rows
    assert row.response_ids.tolist() == [*text_ids("ab"), 1, *text_ids(BETWEEN), *text_ids("c"), 1]
    assert row.response_mask.tolist() == MASK
    assert row.finish_reason == "stop"


def test_each_turn_s_score_stands_on_its_last_token(load: Load, chat: Encoder) -> None:
    (row,) = of_talk(load, chat, turn_scores=[0.25, 1.0]).rows
    places = np.flatnonzero(row.token_level_scores)
    assert places.tolist() == [2, len(MASK) - 1]
    assert row.token_level_scores[places].tolist() == [0.25, 1.0]
    assert row.score == 1.25


def test_turns_of_stored_ids_are_the_runs_of_the_mask(load: Load) -> None:
    ids = text_ids("12") + text_ids("345") + text_ids("6")
    mask = [True, True, False, False, False, True]
    (row,) = load(response_ids=ids, response_mask=mask, turn_scores=[-1.0, 2.0]).rows
    assert row.token_level_scores.tolist() == [0, -1, 0, 0, 0, 2]
    (row,) = load(response_ids=ids, turn_scores=[3.0]).rows  # one turn
    assert row.token_level_scores.tolist() == [0, 0, 0, 0, 0, 3]


def test_the_text_that_is_scored_is_the_last_turn_s_from_messages_and_from_ids(
    load: Load, chat: Encoder
) -> None:
    (one,) = of_talk(load, chat).rows
    assert one.response == "c"
    stored = {"response_ids": one.response_ids.tolist(), "response_mask": one.response_mask.tolist()}
    (again,) = load(chat, **stored).rows
    assert again.response == "c"
    (masked_head,) = load(chat, response_ids=text_ids("abc"), response_mask=[False, True, True]).rows
    assert masked_head.response == "abc"  # one turn, the head of which is not trained


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"turn_scores": [1.0]}, "1 turn_scores but 2 assistant turns that count"),
        ({"turn_scores": [1.0, 2.0, 3.0]}, "3 turn_scores but 2 assistant turns that count"),
        ({"turn_scores": [1.0, None]}, "turn_scores[1] is nan"),
        ({"turn_scores": [1.0, 1e39]}, "turn_scores[1] is inf"),
        ({"turn_scores": "good"}, "turn_scores is text, not a list"),
        ({"turn_scores": [1.0, 2.0], "score": 4.0}, "token_level_scores sum to 3 but score is 4"),
        ({"turn_scores": [1.0, 2.0], "token_level_scores": [0.0]}, "are both there; keep one"),
    ],
)
def test_turn_scores_that_do_not_fit_cost_their_row(
    columns: dict[str, Any], said: str, load: Load, chat: Encoder
) -> None:
    loaded = of_talk(load, chat, **columns)
    assert not loaded.rows
    assert said in loaded.rejects[0].reason


def test_turn_scores_serve_where_scores_are_needed(
    jsonl: WriteParquet, chat: Encoder, data: Data, tmp_path: Any
) -> None:
    path = jsonl([{"prompt": "1", "response": TALK, "turn_scores": [0.0, 1.0]}])
    loaded = load_trajectories(path, chat, data, scored=True)
    assert [row.score for row in loaded.rows] == [1.0]
    lines = [schemas.trajectory_row(row) for row in loaded.rows]
    write_rows(tmp_path / "again.parquet", lines, schemas.TRAJECTORIES)
    (again,) = load_trajectories(tmp_path / "again.parquet", chat, data, scored=True).rows
    assert np.array_equal(again.token_level_scores, loaded.rows[0].token_level_scores)  # type: ignore[arg-type]


def test_a_turn_that_calls_a_tool_without_text_is_a_turn(load: Load, chat: Encoder) -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": "{}"}]}
    talk = [calls, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "c"}]
    (row,) = load(chat, response_ids=..., response=talk, turn_scores=[0.5, 0.5]).rows
    assert row.response_mask.tolist() == [True] + [False] * len(BETWEEN) + [True] * 2
    assert row.token_level_scores[0] == 0.5


def test_the_last_turn_cut_off_has_no_end_token(load: Load, chat: Encoder) -> None:
    (row,) = of_talk(load, chat, finish_reason="length", turn_scores=[0.0, 1.0]).rows
    assert row.response_ids.tolist()[-1:] == text_ids("c")
    assert row.token_level_scores[-1] == 1.0


def test_gae_goes_over_counted_tokens_as_if_the_tool_had_said_nothing(load: Load) -> None:
    """By hand, gamma .5, lam .5: positions 0, 1 and 4 count; rewards 1 on 1 and 2 on 4; V = .5, 1, 3.

    delta_4 = 2 - 3 = -1; delta_1 = 1 + .5 x 3 - 1 = 1.5; delta_0 = 0 + .5 x 1 - .5 = 0;
    A_4 = -1; A_1 = 1.5 + .25 x -1 = 1.25; A_0 = 0 + .25 x 1.25 = .3125.
    """
    (row,) = load(
        response_ids=text_ids("12") + text_ids("99") + text_ids("6"),
        response_mask=[True, True, False, False, True],
        turn_scores=[1.0, 2.0],
    ).rows
    mask = torch.from_numpy(row.response_mask)[None]
    longest = 64
    rewards = shape([row], mask, RewardManager(), max_length=longest, statistics=None).token_level_scores
    assert rewards.tolist() == [[0, 1, 0, 0, 2]]
    values = torch.tensor([[0.5, 1.0, 777.0, -777.0, 3.0]])
    advantages, returns = gae(rewards, values, mask, torch.zeros(1), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.3125, 1.25, 0, 0, -1]]
    assert returns.tolist() == [[0.8125, 2.25, 0, 0, 2]]
    assert masked_mean(advantages, mask).item() == pytest.approx((0.3125 + 1.25 - 1) / 3)
    assert whiten(advantages, mask)[~mask].tolist() == [0, 0]
