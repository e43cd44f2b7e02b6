"""A row's tools reach the chat template, in each layout that peers store them in."""

import json
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_made import CHAT, WriteParquet, characters, text_ids

from rein.config.recipe import Data
from rein.data import schemas as s
from rein.data.audit.fast import Limits, fast_block
from rein.data.loader import Loaded, load_demonstrations, load_pairs, load_prompts, load_trajectories
from rein.data.rows_prompts import UNSHOWN
from rein.data.tokenize import Encoder

TOLD = "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}" + CHAT
BARE = {
    "name": "search",
    "description": "Looks it up.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
TOOL = {"type": "function", "function": BARE}
ROW = {"prompt": [{"role": "user", "content": "1+1="}]}
SIDES = ("chosen", "rejected")
ANSWER = [{"role": "assistant", "content": "2"}]
LOADS: list[tuple[Callable[..., Loaded[Any]], dict[str, Any]]] = [
    (load_prompts, ROW),
    (load_trajectories, ROW | {"response": "2"}),
    (load_trajectories, ROW | {"response": [*ANSWER, {"role": "tool", "content": "7"}, *ANSWER]}),
    (load_trajectories, ROW | {"chosen": "2", "rejected": "3"}),
    (load_pairs, ROW | {"chosen": "2", "rejected": "3"}),
    (load_demonstrations, ROW | {"response": "2"}),
    (load_demonstrations, {"messages": [*ROW["prompt"], *ANSWER, *ROW["prompt"], *ANSWER]}),
]
STORED = [
    [TOOL],
    json.dumps([TOOL]),  # TRL, verl
    [json.dumps(TOOL)],
    json.dumps([BARE]),  # LLaMA-Factory
    [BARE],
    [{"type": "function"} | BARE],
    TOOL,
]


@pytest.fixture
def told() -> Encoder:
    """The chat template, after the names of the tools."""
    return Encoder(characters(template=TOLD), apply_chat_template=None, stop_ids={1})


@pytest.mark.parametrize(("load", "row"), LOADS)
def test_tools_stand_in_the_prompt_and_change_nothing_behind_it(
    load: Callable[..., Loaded[Any]], row: dict[str, Any], told: Encoder, jsonl: WriteParquet, data: Data
) -> None:
    plain = load(jsonl([row]), told, data).rows
    tooled = load(jsonl([row | {"tools": [TOOL, TOOL]}]), told, data).rows
    assert len(plain) == len(tooled) > 0
    for one, other in zip(plain, tooled, strict=True):
        assert other.prompt_ids.tolist() == [*text_ids("<search><search>"), *one.prompt_ids.tolist()]
        for name in ("response_ids", "chosen_ids", "rejected_ids", "response_mask"):
            if hasattr(one, name):
                assert getattr(one, name).tolist() == getattr(other, name).tolist()


@pytest.mark.parametrize("stored", STORED)
def test_every_layout_of_a_tool_is_the_same_tool(
    stored: Any, told: Encoder, parquet: WriteParquet, jsonl: WriteParquet, data: Data
) -> None:
    for write in (parquet, jsonl):
        (row,) = load_prompts(write([ROW | {"tools": stored}]), told, data).rows
        assert row.prompt_ids.tolist()[: len("<search>")] == text_ids("<search>")


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "[]", [], float("nan")])
def test_a_row_without_tools_has_the_ids_that_it_has_without_the_column(
    nothing: Any, told: Encoder, jsonl: WriteParquet, data: Data
) -> None:
    (bare,) = load_prompts(jsonl([ROW]), told, data).rows
    (row,) = load_prompts(jsonl([ROW | {"tools": nothing}]), told, data).rows
    assert row.prompt_ids.tolist() == bare.prompt_ids.tolist()


@pytest.mark.parametrize("odd", [3, True, "search", "[", ["search"], [[]], [{}], [None], "3", {}])
def test_tools_that_cannot_be_read_cost_their_row(
    odd: Any, told: Encoder, jsonl: WriteParquet, data: Data
) -> None:
    pair = ROW | {"chosen": "2", "rejected": "3"}
    loaded = load_trajectories(jsonl([pair, pair | {"tools": odd}]), told, data)
    assert [reject.kind for reject in loaded.rejects] == ["tools", "tools"]
    assert [reject.where for reject in loaded.rejects] == [f"rows.jsonl row 1 {side}" for side in SIDES]
    assert "no list of function descriptions" in loaded.rejects[0].reason


def test_what_a_template_makes_of_odd_tools_is_its_matter_and_costs_a_row(
    jsonl: WriteParquet, data: Data
) -> None:
    strict = Encoder(
        characters(template="{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHAT),
        apply_chat_template=None,
        stop_ids={1},
    )
    loaded = load_prompts(jsonl([ROW, ROW | {"tools": [{"a": 1}]}]), strict, data)
    assert [reject.kind for reject in loaded.rejects] == ["refused by the chat template"]


def test_a_template_that_takes_no_tools_shows_none_which_is_said(
    chat: Encoder, raw: Encoder, jsonl: WriteParquet, data: Data
) -> None:
    for encoder in (chat, raw):
        (bare,) = load_prompts(jsonl([ROW]), encoder, data).rows
        loaded = load_prompts(jsonl([ROW | {"tools": [TOOL]}]), encoder, data)
        assert loaded.rows[0].prompt_ids.tolist() == bare.prompt_ids.tolist()
        assert [note for note in loaded.notes if UNSHOWN in note] == [f"rows.jsonl: 1 of 1 rows: {UNSHOWN}"]


def test_one_question_with_other_tools_is_another_prompt(
    told: Encoder, jsonl: WriteParquet, data: Data
) -> None:
    rows = [ROW | {"response": "2", "tools": tools} for tools in (None, [TOOL], [TOOL], [TOOL, TOOL])]
    groups = [row.group for row in load_trajectories(jsonl(rows), told, data).rows]
    assert groups[0] == "1+1="
    assert groups[1] == groups[2]
    assert len(set(groups)) == 3


def test_stored_ids_are_used_untouched_beside_tools(told: Encoder, jsonl: WriteParquet, data: Data) -> None:
    row = ROW | {"prompt_ids": [5, 6], "response_ids": [7, 1], "tools": [TOOL]}
    (loaded,) = load_trajectories(jsonl([row]), told, data).rows
    assert (loaded.prompt_ids.tolist(), loaded.response_ids.tolist()) == ([5, 6], [7, 1])


def test_the_audit_s_fast_pass_leaves_rows_with_tools_to_the_loader(
    parquet: WriteParquet, data: Data
) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [7, 1]}
    path = parquet([row | {"tools": None}, row | {"tools": "3"}])
    (batch,) = pq.read_table(path).to_batches()
    limits = Limits(data, 99, frozenset({1}), scored=False)
    clean, _ = fast_block(batch, [], "trajectories", limits, path.name, 0)
    assert clean.tolist() == [True, False]


def test_every_kind_of_file_may_hold_tools() -> None:
    for schema in (s.PROMPTS, s.TRAJECTORIES, s.PREFERENCES, s.SFT):
        assert s.TOOLS in schema.names
