"""Claims about the tokens and masks of stored responses."""

from typing import Any

import numpy as np
import pytest
from data_made import Load, byte_pairs, characters, text_ids

from rein.data.rows_trajectories import (
    PADDED,
)
from rein.data.tokenize import Encoder

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}


def test_stored_ids_are_used_untouched_although_their_text_encodes_to_others(load: Load) -> None:
    """The text of x, y re-encodes to the merged z."""
    merging = Encoder(byte_pairs(("1", "2")), apply_chat_template=None, stop_ids={1})
    x, y = (merging.tokenizer.encode(sign)[0] for sign in "12")
    assert len(merging.tokenizer.encode("12")) == 1
    (row,) = load(
        merging, prompt_ids=[x, y], response_ids=[x, y, 1], behavior_log_probs=[-1.0, -2.0, -3.0]
    ).rows
    assert row.prompt_ids.tolist() == [x, y]
    assert row.response_ids.tolist() == [x, y, 1]
    assert row.response == "12"
    np.testing.assert_array_equal(row.behavior_log_probs, [-1.0, -2.0, -3.0])


def test_ids_alone_are_enough(load: Load) -> None:
    (row,) = load(prompt=..., prompt_ids=text_ids("1+1=")).rows
    assert (row.text, row.response, row.prompt_ids.tolist()) == ("1+1=", "2", text_ids("1+1="))


@pytest.mark.parametrize("stored", [[True, True, True, False, False], None])
def test_padding_behind_the_end_token_is_not_counted_though_pad_is_eos(load: Load, stored: Any) -> None:
    """pad = eos, response [a, b, EOS, PAD, PAD], a prompt that itself holds an EOS."""
    padded = Encoder(characters(pad="<eos>"), apply_chat_template=None, stop_ids={1})
    loaded = load(padded, prompt_ids=[ONE, 1, ONE], response_ids=[ONE, TWO, 1, 1, 1], response_mask=stored)
    (row,) = loaded.rows
    assert row.response_mask.tolist() == [True, True, True, False, False]
    assert row.prompt_ids.tolist() == [ONE, 1, ONE]
    assert row.response_ids.tolist() == [ONE, TWO, 1, 1, 1]
    assert (row.response, row.finish_reason) == ("12", "stop")
    assert any(PADDED in note for note in loaded.notes) == (stored is None)


def test_an_end_token_inside_a_response_keeps_what_follows_it(load: Load) -> None:
    (row,) = load(response_ids=[ONE, 1, TWO, 1]).rows
    assert row.response_mask.all()


def test_any_stop_id_finishes_a_response(load: Load) -> None:
    two_ends = Encoder(characters(), apply_chat_template=None, stop_ids={1, 3})
    (row,) = load(two_ends, response_ids=[TWO, 3]).rows
    assert (row.finish_reason, row.response) == ("stop", "2")
    assert row.response_mask.tolist() == [True, True]
    (row,) = load(two_ends, response_ids=[TWO, TWO]).rows
    assert row.finish_reason == ""


@pytest.mark.parametrize(
    ("reason", "kept", "ends"),
    [
        ("stop", "stop", True),
        ("eos", "stop", True),
        (None, "stop", True),
        ("length", "length", False),
        ("max_tokens", "length", False),
        ("abort", "abort", False),
    ],
)
def test_no_end_token_is_invented_for_a_response_that_was_cut_off(
    load: Load, reason: str | None, kept: str, ends: bool
) -> None:
    (row,) = load(response_ids=..., response="22", finish_reason=reason).rows
    assert row.response_ids.tolist() == [TWO, TWO, *([1] if ends else [])]
    assert (row.finish_reason, row.response) == (kept, "22")


def test_a_response_in_messages_counts_only_what_the_assistant_said(load: Load, chat: Encoder) -> None:
    turns = [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "22"},
        {"role": "assistant", "content": "2"},
    ]
    for finish, end in (("stop", [1]), ("length", [])):
        (row,) = load(chat, response_ids=..., response=turns, finish_reason=finish).rows
        counted = row.response_ids[row.response_mask].tolist()
        assert counted == [ONE, 1, TWO, *end]
        assert row.response == "2"
        assert (
            chat.tokenizer.decode(row.response_ids[~row.response_mask].tolist()) == "\n(tool)22\n(assistant)"
        )


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"response_ids": []}, "the response has no tokens"),
        ({"response_ids": ..., "response": ""}, "the response has no tokens"),
        ({"response_ids": ...}, "response is missing"),
        ({"prompt": ...}, "prompt is missing"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"response_mask": [False, False]}, "response_mask counts no token"),
        ({"response_mask": [True]}, "2 response_ids but 1 response_mask"),
        ({"response_mask": [1, 2]}, "response_mask holds int64 values, not true and false"),
        (
            {"response_mask": [True], "response_ids": ..., "response": "2"},
            "response_mask needs response_ids to belong to",
        ),
        ({"response_ids": [TWO, 100]}, "response_ids[1] is 100, vocabulary 101"),
        ({"response_ids": [TWO, 101]}, "response_ids[1] is 101, vocabulary 101"),
        ({"response_ids": [-100, TWO]}, "response_ids[0] is -100, which is negative"),
        ({"prompt_ids": [5, 2**70]}, "prompt_ids holds nulls or mixed values, not integers"),
        ({"response_ids": [1.5, 2.0]}, "response_ids holds float64 values, not integers"),
        ({"response_ids": [TWO, None]}, "response_ids holds nulls or mixed values, not integers"),
        ({"response_ids": "2"}, "response_ids is a number, not a list"),
        ({"behavior_log_probs": [-1.0]}, "2 response_ids but 1 behavior_log_probs"),
        ({"behavior_log_probs": [-1.0, float("nan")]}, "behavior_log_probs[1] is nan"),
        ({"behavior_log_probs": [-1.0, None]}, "behavior_log_probs[1] is nan"),
        ({"behavior_log_probs": [float("-inf"), -1.0]}, "behavior_log_probs[0] is -inf"),
        ({"behavior_log_probs": [-(10**400), -1]}, "behavior_log_probs[0] is -inf"),
        (
            {"behavior_log_probs": [-1.0, 0.25]},
            "behavior_log_probs[1] is 0.25, and a log-prob is never above 0",
        ),
        (
            {"behavior_log_probs": ["-1", "-2"]},
            "behavior_log_probs holds lists, structs or text, not numbers",
        ),
        ({"score": float("nan")}, "score is nan"),
        ({"score": float("inf")}, "score is inf"),
        ({"score": "1.0"}, "score is text, not a number"),
        ({"score": 3.0, "token_level_scores": [0.0, 1.0]}, "token_level_scores sum to 1 but score is 3"),
        ({"token_level_scores": [0.0, float("nan")]}, "token_level_scores[1] is nan"),
        ({"token_level_scores": [0.0]}, "2 response_ids but 1 token_level_scores"),
        ({"temperature": -1.0}, "temperature is -1, not 0 or in [0.01, 100]"),
        ({"temperature": float("nan")}, "temperature is nan, not 0 or in [0.01, 100]"),
        ({"top_p": 0.0}, "top_p is 0, not in (0, 1]"),
        ({"policy_version": 1.5}, "policy_version is 1.5, not a whole number"),
        ({"extra_info": 3}, "extra_info is a number, not a struct"),
        ({"response": "\ud83d", "response_ids": ...}, "response is not valid Unicode at character 0"),
        ({"response": [USER], "response_ids": ...}, "the last message is a user turn, not the assistant's"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(load: Load, columns: dict[str, Any], reason: str) -> None:
    loaded = load(**columns)
    if reason == "response_ids[1] is 100, vocabulary 101":  # the highest id there is
        assert len(loaded.rows) == 1
        return
    assert [(r.where, r.reason) for r in loaded.rejects] == [("rows.jsonl row 0", reason)]
