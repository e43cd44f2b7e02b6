"""Claims about preference rows: three layouts, one pair."""

from typing import Any

import pytest
from data_made import CHAT, WriteParquet, characters, text_ids

from rein.config.recipe import Data
from rein.data.loader import load_pairs, load_trajectories
from rein.data.tokenize import Encoder
from rein.types import PreferencePair

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}

ANSWERS = ({"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"})
LAYOUTS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "messages": {"prompt": [USER], "chosen": [ANSWERS[0]], "rejected": [ANSWERS[1]]},
    "conversations": {"chosen": [USER, ANSWERS[0]], "rejected": [USER, ANSWERS[1]]},
    "conversations beside their prompt": {
        "prompt": "1+1=",
        "chosen": [USER, ANSWERS[0]],
        "rejected": [USER, ANSWERS[1]],
    },
    "single messages": {"prompt": [USER], "chosen": ANSWERS[0], "rejected": ANSWERS[1]},
}


@pytest.mark.parametrize("template", [CHAT, None])
def test_a_pair_has_the_same_ids_in_every_layout(
    parquet: WriteParquet, data: Data, template: str | None
) -> None:
    encoder = Encoder(characters(template=template), apply_chat_template=None, stop_ids={1})
    expected = (encoder.prompt_ids("1+1=").tolist(), [TWO, 1], [text_ids("3")[0], 1])
    for name, row in LAYOUTS.items():
        (pair,) = load_pairs(parquet([row], f"{name}.parquet"), encoder, data).rows
        assert (pair.prompt_ids.tolist(), pair.chosen_ids.tolist(), pair.rejected_ids.tolist()) == expected, (
            name
        )
        assert (pair.chosen, pair.rejected, pair.messages) == ("2", "3", encoder.normal("1+1="))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": ""}, "rejected is empty"),
        ({"chosen": " \n"}, "chosen is empty"),
        ({"rejected": None}, "rejected is missing"),
        ({"rejected": "2"}, "chosen and rejected are the same"),
        ({"rejected": [ANSWERS[1], USER]}, "rejected ends in a user turn"),
        ({"prompt": None}, "prompt is missing, and chosen and rejected do not hold it"),
        ({"margin": float("nan")}, "margin is nan"),
        (
            {"chosen": [USER, ANSWERS[0]]},
            "one of chosen and rejected begins with its prompt, the other does not",
        ),
        (
            {"chosen": [USER, ANSWERS[0]], "rejected": [{"role": "user", "content": "2"}, ANSWERS[1]]},
            "chosen and rejected share no prompt that an answer follows",
        ),
        ({"chosen": "2" * 70}, "chosen: the response has 71 tokens, data.max_response_length is 64"),
    ],
)
def test_a_pair_that_cannot_be_used_says_why(
    jsonl: WriteParquet, chat: Encoder, data: Data, change: dict[str, Any], reason: str
) -> None:
    loaded = load_pairs(jsonl([LAYOUTS["texts"], LAYOUTS["texts"] | change]), chat, data)
    assert [(r.where, r.reason) for r in loaded.rejects] == [("rows.jsonl row 1", reason)]
    assert len(loaded.rows) == 1


def test_conversations_that_part_late_share_their_first_turns(
    jsonl: WriteParquet, chat: Encoder, data: Data
) -> None:
    start = [USER, ANSWERS[0], {"role": "user", "content": "2+2="}]
    row = {"chosen": [*start, {"role": "assistant", "content": "4"}], "rejected": [*start, ANSWERS[1]]}
    (pair,) = load_pairs(jsonl([row]), chat, data).rows
    assert pair.messages == start
    assert pair.prompt_ids.tolist() == chat.prompt_ids(start).tolist()
    assert (pair.chosen, pair.rejected) == ("4", "3")


def test_a_margin_is_kept(jsonl: WriteParquet, raw: Encoder, data: Data) -> None:
    (pair,) = load_pairs(jsonl([LAYOUTS["texts"] | {"margin": 0.5}]), raw, data).rows
    assert isinstance(pair, PreferencePair)
    assert pair.margin == 0.5


def test_a_preferences_file_is_two_trajectories_a_row_of_unknown_behavior(
    jsonl: WriteParquet, chat: Encoder, data: Data
) -> None:
    truth = {"reward_model": {"ground_truth": "2"}, "data_source": "made"}
    path = jsonl([LAYOUTS["texts"] | truth, LAYOUTS["conversations"], LAYOUTS["texts"] | {"rejected": ""}])
    loaded = load_trajectories(path, chat, data)
    assert loaded.total == len(loaded.rows) + len(loaded.rejects) == 6
    assert [row.where for row in loaded.rows[:2]] == ["rows.jsonl row 0 chosen", "rows.jsonl row 0 rejected"]
    chosen, rejected = loaded.rows[:2]
    assert (chosen.response, rejected.response) == ("2", "3")
    assert chosen.response_ids.tolist() == [TWO, 1]
    for row in loaded.rows:
        assert (row.behavior_log_probs, row.score, row.finish_reason) == (None, None, "stop")
    assert chosen.group == rejected.group
    assert (chosen.ground_truth, chosen.data_source) == ("2", "made")
