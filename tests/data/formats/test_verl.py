"""verl's prompts, rollout dumps and generated responses."""

from typing import Any

from formats_made import Convert, system, user

GSM8K: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [user("2+3? After ####.")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0, "answer": "2+3=5\n#### 5", "question": "2+3?"},
}


def dump(text: str, **other: Any) -> dict[str, Any]:
    return {"input": text, "output": "5", "gts": "5", "score": 1.0, "step": 7} | other


def test_prompts_stay_as_they_are(convert: Convert) -> None:
    made = convert([GSM8K], parquet=True)
    assert made.row == GSM8K
    assert "verl, prompts" in made.said


def test_prompts_with_worked_answers_are_demonstrations(convert: Convert) -> None:
    made = convert([GSM8K], to="sft")
    assert (made.row["prompt"], made.row["response"]) == (GSM8K["prompt"], "2+3=5\n#### 5")


def test_a_rollout_dump_with_what_the_reward_function_returned(convert: Convert) -> None:
    made = convert([dump("2+3?", acc=True, pred="5", uid="ab-cd")])
    assert made.row == {
        "prompt": "2+3?",
        "response": "5",
        "score": 1.0,
        "policy_version": 7,
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"acc": True, "pred": "5"},
    }
    assert "the prompt is the text that the chat template had made" in made.said
    assert "uid not carried: a name drawn anew at every step" in made.said


def test_a_rendered_chat_becomes_messages_again(convert: Convert) -> None:
    bare = "system\nBe brief.\nuser\n2+3?\nThink.\nassistant\n"
    turns = (("system", "Be brief."), ("user", "2+3?\nThink."))
    marked = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    marked += "<|im_start|>assistant\n"
    for text in (bare, marked):
        made = convert([dump(text)])
        assert made.row["prompt"] == [system("Be brief."), user("2+3?\nThink.")]
        assert "became messages again" in made.said


def test_a_rendered_chat_of_several_turns_without_marks_stays_text(convert: Convert) -> None:
    text = "user\na\nassistant\nb\nuser\nc\nassistant\n"
    assert convert([dump(text)]).row["prompt"] == text


def test_a_dump_without_truth_or_score(convert: Convert) -> None:
    made = convert([dump("q", gts=None), dump("q", gts=None, score=None)])
    assert "reward_model" not in made.rows[0]
    assert "score" not in made.rows[1]
    assert "rows have no score" in made.said


def test_a_score_that_is_not_finite_is_named(convert: Convert) -> None:
    made = convert([dump("q"), dump("q", score="inf")])
    assert [(r["where"], r["kind"]) for r in made.rejects] == [("in0.jsonl row 1", "score not finite")]


def test_generated_responses_are_a_row_each(convert: Convert) -> None:
    made = convert([GSM8K | {"responses": ["5", "6"]}], parquet=True)
    assert [row["response"] for row in made.rows] == ["5", "6"]
    assert all(row["reward_model"]["ground_truth"] == "5" for row in made.rows)


def test_scored_dumps_make_pairs_of_best_and_worst(convert: Convert) -> None:
    rows = [dump("q", output=str(i), score=i) for i in range(4)] + [dump("p", output="x")]
    made = convert(rows, to="preferences")
    assert [(r["chosen"], r["rejected"]) for r in made.rows] == [("3", "1"), ("2", "0")]
    assert "5 rows in = 4 used in 2 pairs + 1 left out" in made.said
