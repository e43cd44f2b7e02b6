"""Tools of any layout become the column that the chat template is told of."""

import json
from typing import Any

import pytest
from formats_made import Convert, assistant, user

FUNCTION = {"name": "search", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHOICES = {"choices": [{"message": assistant("a"), "finish_reason": "stop"}]}
PAIR = {"chosen": [assistant("a")], "rejected": [assistant("b")]}
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("trl", {"messages": [user("q"), assistant("a")], "tools": [TOOL]}),
    ("trl", {"prompt": [user("q")], "tools": json.dumps([TOOL])} | PAIR),
    ("trl", {"prompt": [user("q")], "completion": [assistant("a")], "tools": [TOOL]}),
    ("llamafactory", {"conversations": TALK, "tools": json.dumps([FUNCTION])}),
    ("llamafactory", {"instruction": "q", "output": "a", "tools": json.dumps([FUNCTION])}),
    ("verl", {"prompt": [user("q")], "data_source": "d", "tools": [TOOL]}),
    ("openai", {"messages": [user("q"), assistant("a")], "functions": [FUNCTION]}),
    ("openai", {"request": {"messages": [user("q")], "tools": [TOOL]}, "response": CHOICES}),
    ("openai", {"custom_id": "1", "body": {"messages": [user("q")], "tools": [TOOL]}}),
    (
        "openai",
        {
            "input": {"messages": [user("q")], "tools": [TOOL]},
            "preferred_output": [assistant("a")],
            "non_preferred_output": [assistant("b")],
        },
    ),
    ("rein", {"prompt": [user("q")], "response": "a", "tools": [TOOL]}),
    ("openrlhf", {"context_messages": [user("q")], "tools": [TOOL]} | PAIR),
]


@pytest.mark.parametrize(("form", "row"), ROWS)
def test_tools_are_a_column_of_their_own(form: str, row: dict[str, Any], convert: Convert) -> None:
    made = convert([row], form=form)
    assert json.loads(made.row["tools"]) == [TOOL]
    assert "tools" not in made.row.get("extra_info", {})


def test_every_answer_of_a_row_has_its_tools_and_no_pair_mixes_them(convert: Convert) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    rows = [
        {"prompt": "q", "responses": ["a", "b"], "scores": [1, 0], "data_source": "d", "tools": [tool]}
        for tool in (TOOL, other)
    ]
    made = convert(rows, form="verl", to="preferences")
    assert [json.loads(row["tools"]) for row in made.rows] == [[TOOL], [other]]


def test_tools_that_cannot_be_read_are_rejected(convert: Convert) -> None:
    row = {"messages": [user("q"), assistant("a")]}
    made = convert([row, row | {"tools": "search"}])
    assert [reject["kind"] for reject in made.rejects] == ["tools"]
    assert "tools" not in made.row


def test_a_column_called_functions_may_be_something_else(convert: Convert) -> None:
    row = {"messages": [user("q"), assistant("a")], "functions": ["sine"]}
    assert convert([row]).row["extra_info"] == {"functions": ["sine"]}
