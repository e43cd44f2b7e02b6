"""OpenRLHF's rows under the names of its scripts and data sets."""

from formats_made import Convert, assistant, system, user


def test_context_messages_are_the_prompt_of_a_pair(convert: Convert) -> None:
    made = convert(
        [{"context_messages": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}]
    )
    assert made.row == {"prompt": [user("q")], "chosen": "a", "rejected": "b"}
    assert "openrlhf, preferences" in made.said


def test_a_question_is_the_prompt_of_a_pair_of_texts(convert: Convert) -> None:
    made = convert([{"question": "q?", "chosen": "Yes a", "rejected": "Yes b"}])
    assert made.row == {"prompt": "q?", "chosen": "Yes a", "rejected": "Yes b"}


def test_pairs_of_whole_conversations_are_cut(convert: Convert) -> None:
    rows = [{"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}]
    assert convert(rows, form="openrlhf").row == {"prompt": [user("q")], "chosen": "a", "rejected": "b"}


def test_prompt_chosen_rejected_with_rewards(convert: Convert) -> None:
    """As its rejection sampling writes pairs."""
    row = {"prompt": "q", "chosen": "a", "chosen_reward": 2.0, "rejected": "b", "rejected_reward": -1.0}
    made = convert([row], form="openrlhf")
    assert made.row == {
        "prompt": "q",
        "chosen": "a",
        "rejected": "b",
        "extra_info": {"chosen_reward": 2.0, "rejected_reward": -1.0},
    }


def test_input_and_output_with_a_reward_are_trajectories(convert: Convert) -> None:
    made = convert([{"input": "q", "output": "a", "reward": 0.25}])
    assert made.row == {"prompt": "q", "response": "a", "score": 0.25}


def test_question_and_response_are_demonstrations(convert: Convert) -> None:
    made = convert([{"question": "q", "response": "a"}])
    assert made.row == {"prompt": "q", "response": "a"}
    assert "written as sft" in made.said


def test_context_messages_alone_are_prompts_with_their_label(convert: Convert) -> None:
    made = convert([{"context_messages": [user("1+1?")], "label": "2", "id": 7}])
    assert made.row == {
        "prompt": [user("1+1?")],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"id": 7},
    }


def test_a_system_prompt_comes_first(convert: Convert) -> None:
    made = convert([{"id": "1", "system_prompt": "Be brief.", "question": "q", "response": "a"}])
    assert made.row["prompt"] == [system("Be brief."), user("q")]
