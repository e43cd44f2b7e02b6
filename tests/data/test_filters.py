"""What a recipe leaves out or cuts: over-long prompts, duplicates; each row counted, none in silence."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_made import CHAT, WriteParquet, characters, text_ids

from rein.config.recipe import Data
from rein.data import cells
from rein.data.loader import (
    load_demonstrations,
    load_pairs,
    load_prompts,
    load_trajectories,
    rejects_kept,
)
from rein.data.rejects import BadRow, TooManyBad
from rein.data.tokenize import Encoder

LONG = "0123456789" * 2
MARKER = text_ids("(assistant)")
CLOSE = [*text_ids("\n"), *MARKER]
BOS = 2


def limits(size: int, truncation: str, **more: Any) -> Data:
    return Data.model_validate(
        {"max_prompt_length": size, "truncation": truncation, "max_bad_fraction": 1.0} | more
    )


@pytest.mark.parametrize(("side", "body"), [("left", LONG[-8:]), ("right", "(user)01")])
def test_a_cut_prompt_keeps_its_one_bos_and_its_generation_marker(
    side: str, body: str, parquet: WriteParquet, chat: Encoder
) -> None:
    size = 1 + 8 + len(CLOSE)
    loaded = load_prompts(parquet([{"prompt": LONG}, {"prompt": "1"}]), chat, limits(size, side))
    cut, whole = loaded.rows
    assert cut.prompt_ids.tolist() == [BOS, *text_ids(body), *CLOSE]
    assert whole.prompt_ids.tolist() == chat.prompt_ids("1").tolist()
    assert cut.text == LONG
    said = f"rows.parquet: 1 of 2 rows: the prompt is cut on the {side} to data.max_prompt_length {size}"
    assert loaded.notes == [said]


@pytest.mark.parametrize(("side", "kept"), [("left", LONG[-5:]), ("right", LONG[:5])])
def test_a_raw_prompt_is_cut_on_the_named_side(
    side: str, kept: str, parquet: WriteParquet, raw: Encoder
) -> None:
    (row,) = load_prompts(parquet([{"prompt": LONG}]), raw, limits(5, side)).rows
    assert row.prompt_ids.tolist() == text_ids(kept)


@pytest.mark.parametrize("side", ["left", "right"])
def test_stored_ids_are_cut_too_and_their_log_probs_no_longer_serve(
    side: str, jsonl: WriteParquet, chat: Encoder
) -> None:
    ids = chat.prompt_ids(LONG).tolist()
    row = {"prompt_ids": ids, "response_ids": [50, 1], "behavior_log_probs": [-1.0, -1.0], "temperature": 1.0}
    short = row | {"prompt_ids": chat.prompt_ids("1").tolist()}
    loaded = load_trajectories(jsonl([row, short]), chat, limits(30, side))
    assert [len(row.prompt_ids) for row in loaded.rows] == [30, len(short["prompt_ids"])]
    assert loaded.rows[0].prompt_ids.tolist()[-len(MARKER) :] == MARKER
    assert loaded.rows[0].prompt_ids.tolist().count(BOS) == 1
    assert loaded.rows[0].behavior_log_probs is None
    assert loaded.rows[1].behavior_log_probs is not None
    assert any("follow the whole prompt, which is cut: left out, behavior unknown" in n for n in loaded.notes)


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_kind_of_rows_is_cut_alike(side: str, jsonl: WriteParquet, chat: Encoder) -> None:
    row = {"prompt": LONG, "response": "2", "chosen": "2", "rejected": "3"}
    path, data = jsonl([row]), limits(30, side)
    cut = load_prompts(path, chat, data).rows[0].prompt_ids.tolist()
    assert len(cut) == 30
    for loads in (load_trajectories, load_pairs, load_demonstrations):
        assert loads(path, chat, data).rows[0].prompt_ids.tolist() == cut  # type: ignore[operator]
    chatted = {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": "2"}]}
    (row_,) = load_demonstrations(jsonl([chatted], "chat.jsonl"), chat, data).rows
    assert row_.prompt_ids.tolist() == cut


def test_a_limit_below_what_the_template_writes_rejects_by_row(jsonl: WriteParquet, chat: Encoder) -> None:
    path = jsonl([{"prompt": LONG}])
    for side in ("left", "right"):
        with pytest.raises(TooManyBad, match="prompt cannot be cut to 5 tokens: 13 are the template's"):
            load_prompts(path, chat, limits(5, side))


def test_a_response_over_its_limit_is_never_cut(jsonl: WriteParquet, raw: Encoder) -> None:
    rows = [{"prompt": "1", "response": LONG}, {"prompt": "1", "response": "2"}]
    loaded = load_trajectories(jsonl(rows), raw, limits(5, "left", max_response_length=5))
    assert [reject.kind for reject in loaded.rejects] == ["response over the limit"]


def test_a_bos_that_is_said_again_is_no_beginning() -> None:
    again = Encoder(
        characters(template=CHAT.replace("{{ bos_token }}", "")), apply_chat_template=None, stop_ids={1}
    )
    ids = again.prompt_ids("<bos>1<bos>23")
    assert again.cut(ids, len(CLOSE) + 2, "left").tolist() == [*text_ids("23"), *CLOSE]
    with pytest.raises(BadRow):
        again.cut(ids, 3, "right")


ONE = {"prompt": "1", "response_ids": [20, 1], "score": 1.0}


def test_duplicates_stay_unless_the_recipe_says_otherwise(jsonl: WriteParquet, raw: Encoder) -> None:
    rows = [ONE, ONE | {"score": 0.0}, ONE | {"response_ids": [21, 1]}, ONE, ONE | {"prompt": "2"}]
    path = jsonl(rows)
    assert len(load_trajectories(path, raw, limits(9, "drop")).rows) == 5
    data = Data(drop_duplicates=True, max_bad_fraction=0.0)
    loaded = load_trajectories(path, raw, data)
    assert [row.where for row in loaded.rows] == [f"rows.jsonl row {i}" for i in (0, 2, 4)]
    assert [(r.where, r.kind, r.reason) for r in loaded.rejects] == [
        (f"rows.jsonl row {i}", "duplicate", "the same tokens as rows.jsonl row 0") for i in (1, 3)
    ]
    assert loaded.notes[0].startswith("rows.jsonl: left out: 2 of 5 rows (2 duplicate); first: ")


@pytest.mark.parametrize(
    ("loads", "more"),
    [(load_prompts, {}), (load_pairs, {}), (load_demonstrations, {}), (load_trajectories, {"ranked": True})],
)
def test_duplicates_of_every_kind_are_found_across_files(
    loads: Any, more: dict[str, Any], jsonl: WriteParquet, raw: Encoder
) -> None:
    row = {"prompt": "1", "chosen": "2", "rejected": "3", "response": "2"}
    files = [jsonl([row], "a.jsonl"), jsonl([row, row | {"prompt": "5"}], "b.jsonl")]
    loaded = loads(files, raw, Data(drop_duplicates=True, max_bad_fraction=0.0), **more)
    each = 2 if more else 1
    assert (len(loaded.rows), len(loaded.rejects), loaded.total) == (2 * each, each, 3 * each)
    assert {reject.reason for reject in loaded.rejects} == {"the same tokens as a.jsonl row 0"}
    assert all(reject.where.startswith("b.jsonl row 0") for reject in loaded.rejects)


def test_a_pair_of_one_chosen_and_another_rejected_is_no_duplicate(jsonl: WriteParquet, raw: Encoder) -> None:
    rows = [{"prompt": "1", "chosen": "2", "rejected": other} for other in ("3", "4")]
    assert len(load_trajectories(jsonl(rows), raw, Data(drop_duplicates=True), ranked=True).rows) == 4


BAD = [
    ({"response_ids": []}, "no tokens", "the response has no tokens"),
    ({"prompt": ""}, "no tokens", "the prompt has no tokens"),
    ({"score": float("nan")}, "score not finite", "score is nan"),
    ({"score": None}, "no score", "score is null"),
    ({"prompt": "1" * 40}, "prompt over the limit", "the prompt has 40 tokens, data.max_prompt_length is 9"),
    ({"response_ids": [20, 999]}, "id outside of the vocabulary", "response_ids[1] is 999, vocabulary 101"),
    ({"behavior_log_probs": [-1.0]}, "lengths differ", "2 response_ids but 1 behavior_log_probs"),
    ({"behavior_log_probs": [-1.0, float("-inf")]}, "log-probs not finite", "behavior_log_probs[1] is -inf"),
]


def test_a_negative_id_is_said_to_be_negative() -> None:
    with pytest.raises(BadRow, match=r"^response_ids\[1\] is -7, which is negative$"):
        cells.ids([20, -7], "response_ids", 2**63 - 1)


def test_rejects_say_file_row_and_reason_even_where_they_stop_the_stage(
    jsonl: WriteParquet, raw: Encoder, tmp_path: Path
) -> None:
    path, said = jsonl([ONE | changed for changed, _, _ in BAD]), tmp_path / "out" / "rejects.jsonl"
    with (
        pytest.raises(TooManyBad, match=r"unusable: 7 of 8 rows .*; all are named in .*rejects\.jsonl$"),
        rejects_kept(said),
    ):
        load_trajectories(path, raw, Data(max_prompt_length=9), scored=True)
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert [(line["file"], line["row"], line["kind"], line["reason"]) for line in lines] == [
        ("rows.jsonl", i, kind, reason) for i, (_, kind, reason) in enumerate(BAD)
    ]


def test_a_degenerate_pair_is_rejected_and_named(jsonl: WriteParquet, raw: Encoder) -> None:
    rows = [
        {"prompt": "1", "chosen": a, "rejected": b}
        for a, b in (("2", "3"), ("2", "2"), ("2", ""), (" ", "2"))
    ]
    loaded = load_pairs(jsonl(rows), raw, limits(9, "drop"))
    assert [reject.kind for reject in loaded.rejects] == [
        "chosen equals rejected",
        "empty answer",
        "empty answer",
    ]
