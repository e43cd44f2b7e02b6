"""LLaMA-Factory's alpaca and ShareGPT rows, and its own demonstration files."""

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from formats_made import Convert, assistant, system, user

from rein.commands.convert import run
from rein.tracking.console import Console

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("REIN_DATA", ROOT.parent / "shared" / "data")) / "llamafactory"


def said(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def test_instruction_and_input_are_one_turn(convert: Convert) -> None:
    made = convert([{"instruction": "Add.", "input": "1+1", "output": "2"}])
    assert made.row == {"prompt": "Add.\n1+1", "response": "2"}
    assert "llamafactory, alpaca" in made.said


def test_an_empty_input_adds_no_line(convert: Convert) -> None:
    assert convert([{"instruction": "Hi", "input": "", "output": "Hello"}]).row["prompt"] == "Hi"


def test_a_system_text_comes_first(convert: Convert) -> None:
    made = convert([{"instruction": "Hi", "output": "Hello", "system": "Be kind."}])
    assert made.row == {"prompt": [system("Be kind."), user("Hi")], "response": "Hello"}


def test_history_is_learned_too(convert: Convert) -> None:
    row = {"instruction": "c", "input": "", "output": "d", "system": "s", "history": [["a", "b"]]}
    assert convert([row]).row == {
        "messages": [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]
    }


def test_an_alpaca_ranking(convert: Convert) -> None:
    made = convert([{"instruction": "q", "input": "", "chosen": "a", "rejected": "b"}])
    assert made.row == {"prompt": "q", "chosen": "a", "rejected": "b"}


def test_an_alpaca_row_with_a_label_is_a_scored_trajectory(convert: Convert) -> None:
    made = convert([{"instruction": "q", "input": "", "output": "a", "kto_tag": False}])
    assert made.row == {"prompt": "q", "response": "a", "score": 0.0}


def test_sharegpt_turns_get_their_roles(convert: Convert) -> None:
    turns = [said("human", "a"), said("gpt", "b"), said("human", "c"), said("gpt", "d")]
    made = convert([{"conversations": turns, "system": "s", "tools": ""}])
    assert made.row == {"messages": [system("s"), user("a"), assistant("b"), user("c"), assistant("d")]}
    assert "tools not carried: no tools in any row" in made.said


def test_a_system_turn_wins_over_the_system_column(convert: Convert) -> None:
    turns = [said("system", "own"), said("human", "a"), said("gpt", "b")]
    assert convert([{"conversations": turns, "system": "other"}]).row["messages"][0] == system("own")


def test_function_calls_and_observations_become_tool_calls_and_tool_turns(convert: Convert) -> None:
    call = json.dumps({"name": "search", "arguments": {"q": "rice"}})
    tools = [{"name": "search", "parameters": {}}]
    turns = [
        said("human", "Find"),
        said("function_call", call),
        said("observation", "3 hits"),
        said("gpt", "3"),
    ]
    made = convert([{"conversations": turns, "tools": json.dumps(tools)}])
    asked = {"type": "function", "function": {"name": "search", "arguments": {"q": "rice"}}}
    assert made.row["messages"] == [
        user("Find"),
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "content": "3 hits"},
        assistant("3"),
    ]
    assert json.loads(made.row["tools"]) == [{"type": "function", "function": tools[0]}]
    assert "tools -> tools" in made.said


def test_a_call_that_is_no_json_is_named(convert: Convert) -> None:
    good = [said("human", "a"), said("gpt", "b")]
    bad = [said("human", "a"), said("function_call", "search(rice)"), said("gpt", "b")]
    made = convert([{"conversations": good}, {"conversations": bad}])
    assert [(r["where"], r["kind"]) for r in made.rejects] == [("in0.jsonl row 1", "tool call")]


def test_a_sharegpt_ranking(convert: Convert) -> None:
    turns = [said("human", "a"), said("gpt", "b"), said("human", "c")]
    row = {"conversations": turns, "chosen": said("gpt", "good"), "rejected": said("gpt", "bad")}
    made = convert([row])
    assert made.row == {
        "prompt": [user("a"), assistant("b"), user("c")],
        "chosen": "good",
        "rejected": "bad",
    }
    assert "ShareGPT ranking" in made.said


def test_openai_turns_with_a_label_are_scored(convert: Convert) -> None:
    made = convert([{"messages": [user("a"), assistant("b")], "label": True}])
    assert made.row == {"prompt": [user("a")], "response": "b", "score": 1.0}


def test_parts_of_reasoning_text_and_calls(convert: Convert) -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    parts = [
        {"type": "reasoning", "value": "Hm."},
        {"type": "text", "value": "I look."},
        {"type": "tool_call", "value": call},
    ]
    turns = [
        {"role": "user", "content": [{"type": "text", "value": "Look"}]},
        {"role": "assistant", "content": parts},
        {"role": "tool", "content": [{"type": "text", "value": "1"}]},
        {"role": "assistant", "content": [{"type": "text", "value": "One."}]},
    ]
    made = convert([{"messages": turns}])
    assert made.row["messages"][1] == {
        "role": "assistant",
        "content": "<think>\nHm.\n</think>\n\nI look.",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert made.row["messages"][3] == assistant("One.")


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("alpaca_en_demo.json", "sft", 999),
        ("alpaca_zh_demo.json", "sft", 1000),
        ("glaive_toolcall_en_demo.json", "sft", 300),
        ("reason_tool_use_demo_50.jsonl", "sft", 50),
        ("dpo_en_demo.json", "preferences", 300),
    ],
)
def test_its_own_files_convert_whole(
    name: str, kind: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not in {DATA}; REIN_DATA names the folder that holds llamafactory/")
    run([str(DATA / name)], str(tmp_path / "out.parquet"), Console())
    said = capsys.readouterr().out
    assert f"written as {kind}\n" in said
    assert f"{rows} rows in = {rows} written + 0 left out" in said
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == rows
