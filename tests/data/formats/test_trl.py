"""TRL's dataset types, standard and conversational."""

import math
from typing import Any

import pytest
from formats_made import Convert, assistant, system, user

from rein.errors import DataError

SKY, BLUE, GREEN = "What color is the sky?", "It is blue.", "It is green."


def test_a_pair_with_its_prompt_apart(convert: Convert) -> None:
    made = convert([{"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}])
    assert made.row == {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    assert "trl, preferences, prompt apart" in made.said
    assert "1 rows in = 1 written + 0 left out" in made.said


def test_a_conversational_pair_with_its_prompt_apart(convert: Convert) -> None:
    made = convert([{"prompt": [user(SKY)], "chosen": [assistant(BLUE)], "rejected": [assistant(GREEN)]}])
    assert made.row == {"prompt": [user(SKY)], "chosen": BLUE, "rejected": GREEN}


def test_the_prompt_inside_two_texts_is_what_both_begin_with_up_to_a_word(convert: Convert) -> None:
    made = convert([{"chosen": "The sky is blue.", "rejected": "The sky is black."}])
    assert made.row == {"prompt": "The sky is", "chosen": " blue.", "rejected": " black."}
    assert "the text that both answers begin with" in made.said


def test_the_prompt_inside_two_conversations_is_what_they_share(convert: Convert) -> None:
    shared = [system("Be brief."), user("Hi"), assistant("Hello"), user(SKY)]
    made = convert([{"chosen": [*shared, assistant(BLUE)], "rejected": [*shared, assistant(GREEN)]}])
    assert made.row == {"prompt": shared, "chosen": BLUE, "rejected": GREEN}
    assert "prompt inside" in made.said


def test_conversations_beside_their_prompt_are_cut_where_they_part(convert: Convert) -> None:
    """As ultrafeedback_binarized has them, with what else that file holds."""
    chosen = [user(SKY), assistant(BLUE)]
    row = {"prompt": SKY, "prompt_id": "ab", "chosen": chosen, "rejected": [user(SKY), assistant(GREEN)]}
    made = convert([{**row, "messages": chosen, "score_chosen": 8.0, "score_rejected": 6.5}])
    assert made.row == {
        "prompt": [user(SKY)],
        "chosen": BLUE,
        "rejected": GREEN,
        "margin": 1.5,
        "extra_info": {"prompt_id": "ab"},
    }
    assert "messages not carried: the same as chosen" in made.said


def test_a_transcript_with_marks_becomes_messages(convert: Convert) -> None:
    before = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: The sky?\n\nAssistant:"
    made = convert([{"chosen": before + " It is blue.", "rejected": before + " It is green."}])
    assert made.row == {
        "prompt": [user("Hi"), assistant("Hello"), user("The sky?")],
        "chosen": BLUE,
        "rejected": GREEN,
    }


def test_a_margin_is_carried(convert: Convert) -> None:
    made = convert([{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}])
    assert made.row["margin"] == 0.5


@pytest.mark.parametrize(
    ("scores", "margin"),
    [((8, 6.5), 1.5), ((2, 3), -1.0), ((8, None), None), ((8, math.nan), None), (("8", 6), None)],
)
def test_two_finite_scores_are_a_margin_and_others_stay_beside(
    scores: tuple[Any, Any], margin: float | None, convert: Convert
) -> None:
    chosen, rejected = scores
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": chosen, "score_rejected": rejected}
    made = convert([pair])
    assert made.row.get("margin") == margin
    to = "extra_info" if margin is None else "margin"
    assert f"score_chosen -> {to}\n" in made.said
    assert ("in their scale" in made.said) == (margin is not None)


def test_a_margin_that_is_given_holds_over_the_scores(convert: Convert) -> None:
    pair = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 8.0, "score_rejected": 6.5}
    made = convert([pair | {"margin": 0.5}])
    assert made.row["margin"] == 0.5
    assert made.row["extra_info"] == {"score_chosen": 8.0, "score_rejected": 6.5}


def test_labeled_rows_are_trajectories_scored_1_and_0(convert: Convert) -> None:
    rows = [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sea is", "completion": " red.", "label": False},
    ]
    made = convert(rows)
    assert [(r["prompt"], r["response"], r["score"]) for r in made.rows] == [
        ("The sky is", " blue.", 1.0),
        ("The sea is", " red.", 0.0),
    ]
    assert "label -> score" in made.said


def test_labeled_rows_of_different_prompts_make_no_pairs(convert: Convert) -> None:
    rows = [
        {"prompt": "a", "completion": "x", "label": True},
        {"prompt": "b", "completion": "y", "label": False},
    ]
    with pytest.raises(DataError, match="in no pair"):
        convert(rows, to="preferences")


def test_labeled_rows_of_one_prompt_do(convert: Convert) -> None:
    rows = [
        {"prompt": "a", "completion": [assistant("x")], "label": False},
        {"prompt": "a", "completion": [assistant("y")], "label": True},
    ]
    made = convert(rows, to="preferences")
    assert (made.row["chosen"], made.row["rejected"]) == ([assistant("y")], [assistant("x")])


def test_logged_completions_keep_reward_and_step(convert: Convert) -> None:
    made = convert([{"step": 3, "prompt": "p", "completion": "c", "reward": 0.5, "advantage": 1.0}])
    assert made.row == {
        "prompt": "p",
        "response": "c",
        "score": 0.5,
        "policy_version": 3,
        "extra_info": {"advantage": 1.0},
    }


def test_prompt_and_completion_are_demonstrations(convert: Convert) -> None:
    made = convert([{"prompt": [user(SKY)], "completion": [assistant(BLUE)]}])
    assert made.row == {"prompt": [user(SKY)], "response": BLUE}
    assert "written as sft" in made.said


def test_prompts_alone(convert: Convert) -> None:
    assert convert([{"prompt": [user(SKY)]}]).row == {"prompt": [user(SKY)]}


def test_text_alone_is_refused_with_the_reason(convert: Convert) -> None:
    with pytest.raises(DataError, match="does not say where the prompt ends"):
        convert([{"text": "The sky is blue."}])


def test_labels_of_steps_are_refused_with_the_reason(convert: Convert) -> None:
    with pytest.raises(DataError, match="no score of the answer"):
        convert([{"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}])


def test_pairs_without_a_difference_or_a_prompt_are_named(convert: Convert) -> None:
    good = {"chosen": "The sky is blue.", "rejected": "The sky is black."}
    same = {"chosen": "Same.", "rejected": "Same."}
    strange = {"chosen": "Yes.", "rejected": "No."}
    empty = {"chosen": "The sky is", "rejected": ""}
    made = convert([good, same, strange, empty])
    assert len(made.rows) == 1
    assert [reject["kind"] for reject in made.rejects] == [
        "chosen equals rejected",
        "no prompt",
        "empty answer",
    ]
    assert made.rejects[0]["where"] == "in0.jsonl row 1"


def test_pictures_are_not_dropped_from_what_they_are_asked_about(convert: Convert) -> None:
    rows = [{"prompt": "What is this?", "completion": "A cat.", "images": ["cat.png"]}]
    with pytest.raises(DataError, match="images are not read"):
        convert([*rows, *rows], bad=0.01)
