"""Every layout of FORMATS knows its rows and reads them; whatever stands in a cell is a row or a BadRow."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa
import pytest
from formats_made import Convert, assistant, user

from rein.data import schemas
from rein.data.formats import FORMATS, decide
from rein.data.formats.kinds import KINDS_OF, as_kind
from rein.data.formats.layout import Layout, Ledger, Source
from rein.data.rejects import BadRow
from rein.data.schemas import Kind
from rein.errors import DataError

TALK = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CHAT = [user("q"), assistant("a")]
OTHER = [user("q"), assistant("b")]
PAIR = {"chosen": "Yes a", "rejected": "Yes b"}
CHOICE = {
    "index": 0,
    "message": assistant("a"),
    "finish_reason": "stop",
    "token_ids": [7],
    "logprobs": {"content": [{"token": "a", "logprob": -0.5}]},
}
OUTPUT = {
    "text": "a",
    "token_ids": [7],
    "logprobs": [{"7": {"logprob": -0.5}}],
    "cumulative_logprob": -0.5,
    "finish_reason": "stop",
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {
        "RequestOutput": {"prompt": "q", "prompt_token_ids": [4], "outputs": [OUTPUT], "finished": True},
        "one output a row": {"prompt": "q", "prompt_token_ids": [4], "sampling_params": {"top_p": 1.0}}
        | OUTPUT,
    },
    "openai": {
        "preference fine-tuning": {
            "input": {"messages": [user("q")]},
            "preferred_output": [assistant("a")],
            "non_preferred_output": [assistant("b")],
        },
        "requests with responses": {
            "request": {"messages": [user("q")], "temperature": 1.0, "top_p": 1.0},
            "response": {"choices": [CHOICE], "model": "m"},
            "score": 1,
        },
        "batch output": {"custom_id": "1", "response": {"status_code": 200, "body": {"choices": [CHOICE]}}},
        "batch input": {"custom_id": "1", "body": {"messages": [user("q")]}},
        "fine-tuning messages": {"messages": CHAT, "tools": []},
    },
    "verl": {
        "generated responses": {"prompt": [user("q")], "responses": ["a"], "data_source": "d"},
        "rollout dump": {"input": "q", "output": "a", "gts": "a", "score": 1.0, "step": 1},
        "prompts": {
            "prompt": [user("q")],
            "data_source": "d",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"answer": "a"},
        },
    },
    "llamafactory": {
        "ShareGPT ranking": {
            "conversations": TALK[:1],
            "chosen": TALK[1],
            "rejected": TALK[1] | {"value": "b"},
        },
        "two conversations": {"chosen_messages": CHAT, "rejected_messages": OTHER},
        "alpaca ranking": {"instruction": "q", "input": "i"} | PAIR,
        "ShareGPT with labels": {"conversations": TALK, "kto_tag": True},
        "alpaca with labels": {"instruction": "q", "input": "i", "output": "a", "kto_tag": True},
        "ShareGPT": {"conversations": TALK, "system": "s", "tools": "[]"},
        "alpaca": {"instruction": "q", "input": "i", "output": "a", "system": "s", "history": [["b", "c"]]},
    },
    "trl": {
        "preferences, prompt apart": {"prompt": "q", "margin": 1.0} | PAIR,
        "preferences, prompt inside": {"chosen": CHAT, "rejected": OTHER},
        "unpaired preferences": {"prompt": "q", "completion": "a", "label": True},
        "scored completions": {"prompt": "q", "completion": "a", "reward": 1.0, "step": 1},
        "prompt and completion": {"prompt": [user("q")], "completion": [assistant("a")]},
        "conversations": {"messages": CHAT},
        "prompts": {"prompt": "q"},
        "stepwise supervision": {"prompt": "q", "completions": ["a"], "labels": [True]},
        "language modeling": {"text": "q a"},
    },
    "rein": {
        "preferences": {"prompt": "q"} | PAIR,
        "trajectories": {"prompt": "q", "response": "a", "score": 1.0, "reward_model": {"ground_truth": "a"}},
        "trajectories by ids": {"prompt_ids": [1], "response_ids": [2], "behavior_log_probs": [-0.5]},
        "demonstrations": {"messages": CHAT},
        "prompts": {"prompt": [user("q")], "extra_info": {"a": 1}},
    },
    "solutions": {
        "solutions by model": {
            "question": "q",
            "ground_truth": "#### 1",
            "m": {"solution": "a", "is_correct": True},
        },
        "lists of solutions": {"question": "q", "generations": ["a", "b"], "scores": [1, 0]},
        "one solution a row": {"problem": "q", "solution": "a", "is_correct": True, "model": "m"},
        "worked problems": {"question": "q", "answer": "a\n#### 1"},
    },
    "openrlhf": {
        "preferences": {"context_messages": [user("q")]} | PAIR,
        "preferences, prompt inside": {"chosen": CHAT, "rejected": OTHER},
        "rewarded answers": {"input": "q", "output": "a", "reward": 1.0},
        "demonstrations": {"question": "q", "response": "a"},
        "prompts": {"context_messages": [user("q")], "label": "a"},
    },
}
ODD: list[Any] = [
    *(None, True, 3, -1.5, float("nan"), float("inf"), 10**400, "", " ", "x", "[", "[]", "{}", "\ud800"),
    *([], {}, [None], [1], ["x"], [[]], [{}], {"x": 1}, {"role": "user"}, [{"role": 1}], [{"from": "x"}]),
    *([{"from": "human", "value": []}], [{"role": "assistant", "content": None}]),
    [{"role": "user", "content": [{"type": "image"}]}],
]
LAYOUTS = [(name, layout) for name, form in FORMATS.items() for layout in form.layouts]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a row, at every depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def with_value(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made: Any = copy.deepcopy(row)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    result: dict[str, Any] = made
    return result


def read(layout: Layout, row: dict[str, Any]) -> list[dict[str, Any]]:
    ledger = Ledger(requests={"1": {"messages": [user("q")]}})
    return [made for one in layout.read(Source(row, ledger)) for made in as_kind(one, layout.kind, ledger)]


def writable(rows: list[dict[str, Any]], kind: Kind) -> None:
    """As write_rows would: each column in its type."""
    for field in KINDS_OF[kind]:
        values = [row.get(field.name) for row in rows]
        free = schemas.FREE_KEY in (field.metadata or {})
        pa.array([json.dumps(v, ensure_ascii=False) for v in values] if free else values, type=field.type)


@pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name}-{layout.name}" for name, layout in LAYOUTS]
)
def test_a_layout_knows_its_row_and_reads_it(name: str, layout: Layout) -> None:
    row = ROWS[name][layout.name]
    assert layout.fits(row)
    if layout.refused:
        return
    assert decide("a file", [row], name).layout is layout
    made = read(layout, row)
    assert made
    assert all(set(one) <= set(KINDS_OF[layout.kind].names) for one in made)


@pytest.mark.parametrize(
    ("name", "layout"), LAYOUTS, ids=[f"{name}-{layout.name}" for name, layout in LAYOUTS]
)
def test_whatever_stands_in_a_cell_is_a_row_or_a_reason(name: str, layout: Layout) -> None:
    row = ROWS[name][layout.name]
    for path in places(row):
        for value in ODD:
            odd = with_value(row, path, value)
            for _, other in LAYOUTS:
                other.fits(odd)
            try:
                writable([] if layout.refused else read(layout, odd), layout.kind)
            except BadRow:
                continue
            except Exception as error:
                raise AssertionError(f"{path} = {str(value)[:60]!r}") from error
    for missing in row:
        with suppress(BadRow):
            read(layout, {key: value for key, value in row.items() if key != missing})


PARTICULAR: Final = {
    "choices": (
        lambda i: {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "more"},
            ],
            "choices": [{"message": {"role": "assistant", "content": "b"}}],
        },
        {"choices": []},
        "trajectories",
    ),
    "trl label": (
        lambda i: {"prompt": f"q{i}", "completion": "a", "label": i % 2 == 0},
        {"label": None},
        "trajectories",
    ),
    "ShareGPT label": (
        lambda i: {
            "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}],
            "label": i % 2 == 0,
        },
        {"label": None},
        "trajectories",
    ),
    "alpaca rejected": (
        lambda i: {"instruction": f"q{i}", "input": "", "output": "x", "chosen": "a", "rejected": "b"},
        {"rejected": None},
        "preferences",
    ),
    "prompt": (
        lambda i: {"prompt": f"q{i}", "chosen": "the a", "rejected": "the b"},
        {"prompt": None},
        "preferences",
    ),
}


@pytest.mark.parametrize("name", PARTICULAR)
def test_one_odd_row_is_rejected_and_changes_no_layout(name: str, convert: Convert) -> None:
    made, odd, kind = PARTICULAR[name]
    rows = [made(i) for i in range(20)]
    clean = convert(rows)
    rows[7] |= odd
    found = convert(rows)
    assert f"written as {kind}" in found.said
    assert [reject["where"] for reject in found.rejects] == ["in0.jsonl row 7"]
    assert found.rows == clean.rows[:7] + clean.rows[8:]


def test_a_demonstration_ends_in_an_answer(convert: Convert) -> None:
    good = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = convert([{"messages": good}, {"messages": [*good, {"role": "user", "content": "q"}]}])
    assert [row["messages"] for row in found.rows] == [good]
    assert [(r["where"], r["reason"]) for r in found.rejects] == [
        ("in0.jsonl row 1", "the last message is a user turn")
    ]


@pytest.mark.parametrize(
    ("row", "near"),
    [
        (
            {"prompts": 1, "chosen": 2, "reject": 3},
            "trl, preferences, prompt apart (prompt, chosen, rejected)",
        ),
        ({"instructions": 1, "inputs": 2, "outputs": 3}, "llamafactory, alpaca (instruction, input, output)"),
        ({"chosen_message": 1}, "llamafactory, two conversations (chosen_messages, rejected_messages)"),
        ({"input": 1, "output": 2, "step": 3, "x": 4}, "verl, rollout dump (input, output, score, step)"),
        ({f"column_{i:03d}": i for i in range(500)}, "none"),
    ],
)
def test_a_file_of_no_known_layout_is_told_the_nearest_in_a_short_line(
    row: dict[str, Any], near: str
) -> None:
    with pytest.raises(DataError) as caught:
        decide("rows.jsonl", [row])
    said = str(caught.value)
    assert near in said.partition("nearest: ")[2]
    assert f"(columns: {next(iter(row))}" in said
    assert said.endswith("--from vllm|openai|verl|llamafactory|trl|rein|solutions|openrlhf")
    assert len(said) <= 430
    assert said.isprintable()
