"""Requests with responses, batches, fine-tuning files; which log-probs may be used."""

import json
from typing import Any

import pytest
from formats_made import Convert, assistant, system, user

from rein.data.formats.layout import Options
from rein.errors import DataError

ASKED = {"model": "m", "messages": [user("1+1?")], "temperature": 1.0}


def chat(text: str = "2", **choice: Any) -> dict[str, Any]:
    """A chat completion with one choice."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m-0613",
        "choices": [{"index": 0, "message": assistant(text), "finish_reason": "stop"} | choice],
        "usage": {"completion_tokens": 2},
    }


def completion(text: str = "2", **choice: Any) -> dict[str, Any]:
    return {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "length"} | choice],
    }


def content(*tokens: tuple[str, float]) -> dict[str, Any]:
    """Log-probs of a chat choice."""
    entries = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in tokens]
    return {"content": entries}


def test_a_request_beside_its_response(convert: Convert) -> None:
    made = convert([{"request": ASKED, "response": chat()}])
    assert made.row == {
        "prompt": [user("1+1?")],
        "response": "2",
        "finish_reason": "stop",
        "temperature": 1.0,
        "behavior_policy": "m-0613",
    }


def test_a_request_around_the_choices(convert: Convert) -> None:
    made = convert([{"prompt": "1+1=", "temperature": 0.5, "top_p": 0.9, "max_tokens": 4} | completion()])
    assert made.row == {
        "prompt": "1+1=",
        "response": "2",
        "finish_reason": "length",
        "temperature": 0.5,
        "top_p": 0.9,
        "behavior_policy": "m",
    }
    assert "max_tokens not carried: settings of the request" in made.said


def test_each_choice_is_a_row_with_its_score(convert: Convert) -> None:
    choices = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in range(2)]
    row = {"prompt": "1+1=", "object": "text_completion", "choices": choices, "scores": [0, 1], "label": "2"}
    made = convert([row])
    assert [(r["response"], r["score"]) for r in made.rows] == [("0", 0.0), ("1", 1.0)]
    assert made.rows[0]["reward_model"]["ground_truth"] == "2"
    assert "1 rows in, holding 2 answers = 2 written + 0 left out" in made.said


def test_ids_make_the_log_probs_usable(convert: Convert) -> None:
    """As vLLM's server adds them with return_token_ids."""
    choice = {"token_ids": [7, 1], "logprobs": content(("2", -0.5), ("", -0.25))}
    made = convert([{"request": ASKED, "response": chat(**choice) | {"prompt_token_ids": [4, 5]}}])
    assert made.row["prompt_ids"] == [4, 5]
    assert made.row["response_ids"] == [7, 1]
    assert made.row["behavior_log_probs"] == [-0.5, -0.25]


def test_tokens_that_name_their_ids_are_ids(convert: Convert) -> None:
    held = {"tokens": ["token_id:7", "token_id:1"], "token_logprobs": [-0.5, -0.25], "text_offset": [4, 5]}
    made = convert([{"request": {"prompt": "1+1=", "temperature": 1}, "response": completion(logprobs=held)}])
    assert made.row["response_ids"] == [7, 1]
    assert made.row["behavior_log_probs"] == [-0.5, -0.25]


def test_token_texts_are_no_ids(convert: Convert) -> None:
    made = convert([{"request": ASKED, "response": chat(logprobs=content(("2", -0.5)))}])
    assert not {"response_ids", "behavior_log_probs"} & set(made.row)
    assert "1 rows: log-probs left out, behavior unknown: the tokens are named by their texts" in made.said


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"temperature": 0}, "temperature 0 is no distribution"),
        ({"temperature": 0.7}, "--log-probs says"),
        ({"top_p": 0.9}, "sampled with top_p"),
        ({"top_k": 20}, "sampled with top_k"),
        ({"frequency_penalty": 0.5}, "sampled with frequency_penalty"),
        ({"logit_bias": {"5": -100}}, "sampled with logit_bias"),
    ],
)
def test_log_probs_of_a_bent_distribution_are_left_out(
    asked: dict[str, Any], why: str, convert: Convert
) -> None:
    choice = {"token_ids": [7], "logprobs": content(("2", -0.5))}
    made = convert([{"request": ASKED | asked, "response": chat(**choice)}])
    assert made.row["response_ids"] == [7]
    assert "behavior_log_probs" not in made.row
    assert why in made.said


def test_processed_log_probs_are_of_the_rows_temperature(convert: Convert) -> None:
    choice = {"token_ids": [7], "logprobs": content(("2", -0.5))}
    row = {"request": ASKED | {"temperature": 0.7}, "response": chat(**choice)}
    made = convert([row], options=Options(log_probs="processed"))
    assert (made.row["behavior_log_probs"], made.row["temperature"]) == ([-0.5], 0.7)
    assert "behavior_log_probs" not in convert([row], options=Options(log_probs="raw")).row


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([("2", -0.5), ("", -0.1)], "their number is not that of the ids"),
        ([("2", -9999.0)], "not finite or above 0"),
        ([("2", 0.5)], "not finite or above 0"),
    ],
)
def test_log_probs_that_cannot_be_are_left_out(
    numbers: list[tuple[str, float]], why: str, convert: Convert
) -> None:
    made = convert([{"request": ASKED, "response": chat(token_ids=[7], logprobs=content(*numbers))}])
    assert "behavior_log_probs" not in made.row
    assert why in made.said


def test_an_echoed_prompt_is_cut_off(convert: Convert) -> None:
    held = {
        "tokens": ["token_id:4", "token_id:5", "token_id:7"],
        "token_logprobs": [None, -3.0, -0.5],
        "text_offset": [0, 3, 4],
    }
    asked = {"prompt": "1+1=", "echo": True, "temperature": 1}
    made = convert([{"request": asked, "response": completion("1+1=2", logprobs=held)}])
    assert made.row["response"] == "2"
    assert (made.row["response_ids"], made.row["behavior_log_probs"]) == ([7], [-0.5])


def test_a_prompt_of_ids(convert: Convert) -> None:
    made = convert([{"request": {"prompt": [4, 5]}, "response": completion(token_ids=[7])}])
    assert (made.row["prompt_ids"], made.row["response_ids"]) == ([4, 5], [7])


def test_a_response_that_calls_a_tool_is_a_message(convert: Convert) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    made = convert([{"request": ASKED, "response": chat(message=message, finish_reason="tool_calls")}])
    parsed = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert made.row["response"] == [{"role": "assistant", "content": "", "tool_calls": [parsed]}]


def test_a_batch_is_joined_with_its_requests_whatever_the_order(convert: Convert) -> None:
    outputs = [
        {"id": "b1", "custom_id": "q2", "response": {"status_code": 200, "body": chat("4")}, "error": None},
        {"id": "b2", "custom_id": "q1", "response": {"status_code": 200, "body": chat("2")}, "error": None},
        {"id": "b3", "custom_id": "q3", "response": {"status_code": 500, "body": {}}, "error": None},
        {"id": "b4", "custom_id": "q9", "response": {"status_code": 200, "body": chat("?")}, "error": None},
        {"id": "b5", "custom_id": "q1", "response": None, "error": {"code": "expired"}},
    ]
    requests = [
        {
            "custom_id": f"q{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": ASKED | {"messages": [user(f"{i}+{i}?")]},
        }
        for i in (1, 2, 3)
    ]
    made = convert(outputs, requests)
    assert [(r["prompt"][0]["content"], r["response"]) for r in made.rows] == [("2+2?", "4"), ("1+1?", "2")]
    assert "3 requests of in1.jsonl are joined by custom_id" in made.said
    assert [r["kind"] for r in made.rejects] == ["failed request", "no prompt", "failed request"]
    assert "5 rows in = 2 written + 3 left out" in made.said


def test_a_batch_output_alone_says_what_is_missing(convert: Convert) -> None:
    row = {"custom_id": "q1", "response": {"status_code": 200, "body": chat()}, "error": None}
    with pytest.raises(DataError, match="give the batch's input file too"):
        convert([row], bad=0.01)


def test_a_batch_input_alone_holds_prompts(convert: Convert) -> None:
    made = convert([{"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": ASKED}])
    assert made.row["prompt"] == [user("1+1?")]
    assert "written as prompts" in made.said


def test_request_and_response_as_json_text(convert: Convert) -> None:
    made = convert([{"request": json.dumps(ASKED), "response": json.dumps(chat())}])
    assert (made.row["prompt"], made.row["response"]) == ([user("1+1?")], "2")


def test_fine_tuning_messages(convert: Convert) -> None:
    made = convert([{"messages": [system("s"), user("a"), assistant("b")]}])
    assert made.row == {"messages": [system("s"), user("a"), assistant("b")]}
    assert "written as sft" in made.said


def test_answers_of_weight_0_are_not_trained(convert: Convert) -> None:
    idle = assistant("b") | {"weight": 0}
    made = convert([{"messages": [user("a"), idle, user("c"), assistant("d") | {"weight": 1}]}])
    assert made.row == {"prompt": [user("a"), assistant("b"), user("c")], "response": "d"}
    mixed = [user("a"), assistant("b"), user("c"), idle]
    with pytest.raises(DataError, match="answers of weight 0"):
        convert([{"messages": mixed}], bad=0.5)


def test_preference_fine_tuning(convert: Convert) -> None:
    row = {
        "input": {"messages": [user("q")], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [assistant("a")],
        "non_preferred_output": [assistant("b")],
    }
    assert convert([row]).row == {"prompt": [user("q")], "chosen": "a", "rejected": "b"}
