"""Claims about rows to imitate."""

import json
from typing import Any

import pytest
from data_made import WriteParquet, text_ids

from rein.config.recipe import Data
from rein.data.loader import load_demonstrations
from rein.data.tokenize import Encoder

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}
ANSWERS = ({"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"})


def test_texts_messages_and_dotted_keys_give_the_same_demonstration(
    parquet: WriteParquet, chat: Encoder, data: Data
) -> None:
    texts = {"prompt": "1+1=", "response": "2"}
    talk = {"messages": [USER, ANSWERS[0]]}
    nested = {"prompt": "x", "extra_info": {"question": "1+1=", "answer": {"text": "2"}}}
    keys = {"prompt_key": "extra_info.question", "response_key": "extra_info.answer.text"}
    found = [
        load_demonstrations(parquet([texts]), chat, data).rows[0],
        load_demonstrations(parquet([talk]), chat, data).rows[0],
        load_demonstrations(parquet([talk | {"prompt": "other"}]), chat, data).rows[0],
        load_demonstrations(parquet([nested]), chat, data, **keys).rows[0],
        load_demonstrations(
            parquet([{"extra_info": json.dumps(nested["extra_info"])}]), chat, data, **keys
        ).rows[0],
    ]
    for row in found:
        assert row.prompt_ids.tolist() == chat.prompt_ids([USER]).tolist()
        assert row.response_ids.tolist() == [TWO, 1]
        assert row.response_mask.all()


def test_a_stored_trajectory_can_be_imitated_as_it_is(
    parquet: WriteParquet, chat: Encoder, data: Data
) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [ONE, TWO, 1], "response_mask": [False, True, True]}
    (found,) = load_demonstrations(parquet([row]), chat, data).rows
    assert (found.prompt_ids.tolist(), found.response_ids.tolist()) == ([5, 6], [ONE, TWO, 1])
    assert found.response_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1", "response": ""}, "the response has no tokens"),
        ({"prompt": "1", "response": None}, "response is missing"),
        ({"prompt": "1", "response": 4}, "response is a number, not text or a list of messages"),
        ({"messages": [USER]}, "the messages hold no assistant turn to learn"),
        ({"messages": "hello"}, "messages is text, not a list of messages"),
        (
            {"messages": [{"from": "human", "value": "x"}]},
            "messages[0] is no message: it needs a role and content",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]},
            "messages[1].content is a list, not text",
        ),
    ],
)
def test_a_demonstration_that_cannot_be_used_says_why(
    jsonl: WriteParquet, chat: Encoder, data: Data, row: dict[str, Any], reason: str
) -> None:
    loaded = load_demonstrations(jsonl([{"prompt": "1", "response": "2", "messages": None}, row]), chat, data)
    assert [(r.where, r.reason) for r in loaded.rejects] == [("rows.jsonl row 1", reason)]


def test_text_parts_of_a_message_are_joined(jsonl: WriteParquet, chat: Encoder, data: Data) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    (row,) = load_demonstrations(
        jsonl([{"messages": [{"role": "user", "content": parts}, ANSWERS[0]]}]), chat, data
    ).rows
    assert row.prompt_ids.tolist() == chat.prompt_ids([USER]).tolist()
