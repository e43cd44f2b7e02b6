"""Claims about rows of prompts."""

import json
from typing import Any

import pytest
from data_made import WriteParquet, text_ids

from rein.config.recipe import Data
from rein.data.loader import load_prompts
from rein.data.tokenize import Encoder

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize("prompt", [[USER], json.dumps([USER]), "1+1=", USER])
def test_messages_their_json_text_and_one_user_turn_are_the_same_prompt(
    prompt: Any, jsonl: WriteParquet, chat: Encoder, data: Data
) -> None:
    (row,) = load_prompts(jsonl([{"prompt": prompt}]), chat, data).rows
    assert row.messages == [USER]
    assert row.prompt_ids.tolist() == chat.prompt_ids([USER]).tolist()
    assert row.text == "1+1="


def test_verls_columns_come_through(parquet: WriteParquet, raw: Encoder, data: Data) -> None:
    verl = {
        "prompt": [USER],
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0, "split": "train"},
    }
    for row in (verl, verl | {"reward_model": json.dumps(verl["reward_model"])}):
        (prompt,) = load_prompts(parquet([row]), raw, data).rows
        assert (prompt.ground_truth, prompt.data_source) == ("2", "openai/gsm8k")
        assert prompt.extra_info == {"index": 0, "split": "train"}
        assert prompt.messages == "1+1="  # no template: raw text


def test_a_prompt_that_ends_in_its_answer_is_rejected(jsonl: WriteParquet, chat: Encoder, data: Data) -> None:
    loaded = load_prompts(
        jsonl([{"prompt": [USER]}, {"prompt": [USER, {"role": "assistant", "content": "2"}]}]), chat, data
    )
    assert [reject.reason for reject in loaded.rejects] == ["the prompt's last message is an assistant turn"]
