"""Worked problems, and stored solutions with verdicts, GSM8K's own file among them."""

import os
from collections import Counter
from pathlib import Path

import pytest
from formats_made import Convert, user

from rein.commands.convert import run
from rein.data.parquet import read_rows
from rein.tracking.console import Console

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("REIN_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"


def test_a_worked_problem_is_a_prompt_in_verls_layout(convert: Convert) -> None:
    made = convert([{"question": "How many?", "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234"}])
    assert made.row == {
        "prompt": [user("How many?")],
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {
            "question": "How many?",
            "answer": "1000+234=<<1000+234=1234>>1234\n#### 1,234",
        },
    }


def test_a_worked_problem_is_a_demonstration_on_request(convert: Convert) -> None:
    made = convert([{"question": "How many?", "answer": "Two.\n#### 2"}], to="sft")
    assert (made.row["prompt"], made.row["response"]) == ([user("How many?")], "Two.\n#### 2")


def test_each_models_solution_is_a_trajectory_of_that_policy(convert: Convert) -> None:
    row = {
        "question": "How many?",
        "ground_truth": "It is two.\nA: 2",
        "small": {"solution": "A: 3", "is_correct": False},
        "large": {"solution": "A: 2", "is_correct": True},
    }
    made = convert([row])
    common = {
        "prompt": [user("How many?")],
        "group": "How many?",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"reference": "It is two.\nA: 2"},
    }
    assert made.rows == [
        {**common, "response": "A: 3", "score": 0.0, "behavior_policy": "small"},
        {**common, "response": "A: 2", "score": 1.0, "behavior_policy": "large"},
    ]
    pair = convert([row], to="preferences").row
    assert (pair["chosen"], pair["rejected"]) == ("A: 2", "A: 3")


def test_a_solution_that_cannot_be_used_leaves_the_others(convert: Convert) -> None:
    row = {
        "question": "How many?",
        "a": {"solution": " ", "is_correct": False},
        "b": {"solution": "2", "is_correct": True},
    }
    made = convert([row])
    assert made.row["behavior_policy"] == "b"
    assert [(r["where"], r["kind"]) for r in made.rejects] == [("in0.jsonl row 0 answer 0", "empty answer")]
    assert "1 rows in, holding 2 answers = 1 written + 1 left out" in made.said


def test_a_list_of_solutions_with_a_list_of_verdicts(convert: Convert) -> None:
    row = {"problem": "p", "answer": "2", "generations": ["2", "3"], "correctness_math_verify": [True, False]}
    made = convert([row | {"model": "m"}])
    assert [(r["response"], r["score"], r["behavior_policy"]) for r in made.rows] == [
        ("2", 1.0, "m"),
        ("3", 0.0, "m"),
    ]
    assert made.rows[0]["reward_model"]["ground_truth"] == "2"


def test_a_list_of_structs(convert: Convert) -> None:
    row = {"question": "q", "samples": [{"text": "a", "score": 0.5}, {"text": "b", "score": 2}]}
    assert [(r["response"], r["score"]) for r in convert([row]).rows] == [("a", 0.5), ("b", 2.0)]


def test_one_solution_a_row(convert: Convert) -> None:
    row = {"problem": "p", "generated_solution": "s", "is_correct": "true", "expected_answer": "2"}
    made = convert([row])
    assert (made.row["response"], made.row["score"]) == ("s", 1.0)
    assert made.row["reward_model"]["ground_truth"] == "2"


def test_gsm8ks_stored_solutions_are_rows_and_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = DATA / "example_model_solutions.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not there; REIN_DATA names the folder that holds gsm8k/")
    run([str(file)], str(tmp_path / "rows.parquet"), Console(), limit=300)
    rows = [row for _, row in read_rows(tmp_path / "rows.parquet")]
    assert len(rows) == 4 * 300
    right = Counter(row["behavior_policy"] for row in rows if row["score"] == 1)
    assert set(right) == {"6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"}
    assert right["175b_verification"] > right["6b_finetuning"]
    assert all(row["reward_model"]["ground_truth"].lstrip("-")[0].isdigit() for row in rows)
    run([str(file)], str(tmp_path / "pairs.parquet"), Console(), to="preferences", limit=300)
    said = capsys.readouterr().out
    questions = [tuple(row["score"] for row in rows[i : i + 4]) for i in range(0, len(rows), 4)]
    # Two of four right: both meet a wrong one. One or three: one pair, of the best and the worst.
    pairs = sum({0: 0, 4: 0, 2: 2}.get(int(sum(scores)), 1) for scores in questions)
    assert f"1200 answers = {2 * pairs} used in {pairs} pairs + {1200 - 2 * pairs} left out" in said
