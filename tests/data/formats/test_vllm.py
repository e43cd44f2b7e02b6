"""vLLM's outputs, with log-probs in each of the forms they come in."""

from typing import Any

import pytest
from formats_made import Convert, user

from rein.data.formats.layout import Options
from rein.errors import DataError

IDS, NUMBERS = [7, 1], [-0.5, -0.25]
FORMS: dict[str, list[Any]] = {
    "id to struct": [
        {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "2"}, "8": {"logprob": -1.0, "rank": 2}},
        {"1": {"logprob": -0.25, "rank": 1, "decoded_token": ""}},
    ],
    "id to number": [{"7": -0.5, "8": -1.0}, {"1": -0.25}],
    "numbers": [-0.5, -0.25],
    "structs with ids": [{"token_id": 7, "logprob": -0.5}, {"token_id": 1, "logprob": -0.25}],
    "lists of structs": [
        [{"token_id": 8, "logprob": -0.1}, {"token_id": 7, "logprob": -0.5}],
        [{"token_id": 1, "logprob": -0.25}],
    ],
    "pairs": [[[8, -0.1], [7, -0.5]], [[1, -0.25]]],
    "pairs with structs": [[[7, {"logprob": -0.5}]], [[1, {"logprob": -0.25}]]],
}


def output(**other: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "2",
        "token_ids": IDS,
        "cumulative_logprob": sum(NUMBERS),
        "logprobs": FORMS["id to struct"],
        "finish_reason": "stop",
        "stop_reason": None,
    } | other


def request(*outputs: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "request_id": "0",
        "prompt": "1+1=",
        "prompt_token_ids": [4, 5],
        "prompt_logprobs": None,
        "outputs": list(outputs) or [output()],
        "finished": True,
        "metrics": None,
    } | other


@pytest.mark.parametrize("form", FORMS)
def test_the_chosen_tokens_log_probs_are_found(form: str, convert: Convert) -> None:
    made = convert([request(output(logprobs=FORMS[form]), temperature=1.0)])
    assert made.row == {
        "prompt": "1+1=",
        "prompt_ids": [4, 5],
        "response": "2",
        "response_ids": IDS,
        "behavior_log_probs": NUMBERS,
        "finish_reason": "stop",
        "temperature": 1.0,
    }
    assert "vllm, RequestOutput" in made.said


def test_parquet_gives_the_same(convert: Convert) -> None:
    rows = [request(temperature=1.0), request(output(token_ids=[8, 1], logprobs=FORMS["id to struct"]))]
    made = convert(rows, parquet=True)
    assert made.rows[0]["behavior_log_probs"] == NUMBERS
    assert made.rows[0]["response_ids"] == IDS


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"logprobs": [{"8": -0.1}, {"1": -0.25}]}, "the chosen token is not among them"),
        ({"logprobs": FORMS["numbers"][:1]}, "their number is not that of the ids"),
        ({"cumulative_logprob": -3.0}, "they do not sum to cumulative_logprob"),
        ({"logprobs": None}, "one number for the whole answer"),
    ],
)
def test_log_probs_that_cannot_be_used_leave_the_row(
    other: dict[str, Any], why: str, convert: Convert
) -> None:
    made = convert([request(output(**other), temperature=1.0)])
    assert made.row["response_ids"] == IDS
    assert "behavior_log_probs" not in made.row
    assert "note: 1 rows: log-probs left out, behavior unknown: " in made.said
    assert why in made.said


def test_sampling_params_say_whether_the_log_probs_can_be_used(convert: Convert) -> None:
    whole = convert([request(sampling_params={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "n": 1})])
    assert whole.row["behavior_log_probs"] == NUMBERS
    cut = convert([request(sampling_params={"temperature": 1.0, "top_p": 0.8})])
    assert "behavior_log_probs" not in cut.row
    assert (cut.row["temperature"], cut.row["top_p"]) == (1.0, 0.8)


def test_a_temperature_that_is_not_stored_is_assumed_aloud_or_given(convert: Convert) -> None:
    assumed = convert([request()])
    assert "temperature" not in assumed.row
    assert "no temperature is stored: 1 is assumed" in assumed.said
    given = convert([request()], options=Options(temperature=0.5))
    assert given.row["temperature"] == 0.5
    assert "behavior_log_probs" not in given.row


def test_every_output_of_a_request_is_a_row(convert: Convert) -> None:
    rows = [request(output(index=0), output(index=1, text="3", finish_reason="length"), scores=[1, 0])]
    made = convert(rows)
    assert [(r["response"], r["score"], r["finish_reason"]) for r in made.rows] == [
        ("2", 1.0, "stop"),
        ("3", 0.0, "length"),
    ]


def test_one_output_a_row(convert: Convert) -> None:
    row = {
        "prompt": [user("1+1?")],
        "prompt_token_ids": [4, 5],
        "generated_text": "2",
        "token_ids": IDS,
        "logprobs": FORMS["id to number"],
        "cumulative_logprob": -0.75,
        "finish_reason": "stop",
        "temperature": 1.0,
        "score": 1,
        "model": "m",
        "ground_truth": "2",
    }
    made = convert([row])
    assert made.row["prompt"] == [user("1+1?")]
    assert made.row["behavior_log_probs"] == NUMBERS
    assert (made.row["score"], made.row["behavior_policy"]) == (1.0, "m")
    assert made.row["reward_model"]["ground_truth"] == "2"


def test_what_was_not_finished_is_named(convert: Convert) -> None:
    rows = [request(), request(finished=False), request(output(finish_reason="abort"))]
    made = convert(rows)
    assert [r["kind"] for r in made.rejects] == ["unfinished", "unfinished"]
    with pytest.raises(DataError, match="the request was not finished"):
        convert(rows, bad=0.5)


def test_each_answer_of_a_row_has_the_row_s_context(convert: Convert) -> None:
    context = {"data_source": "d", "reward_model": {"ground_truth": "3"}, "extra_info": {"k": 1}, "mine": 2}
    made = convert([{"prompt": "q", "outputs": [output(), output(text="3")], **context}])
    assert [row["response"] for row in made.rows] == ["2", "3"]
    for row in made.rows:
        assert (row["data_source"], row["reward_model"]) == ("d", {"ground_truth": "3"})
        assert row["extra_info"] == {"k": 1, "mine": 2}
