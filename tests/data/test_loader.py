"""Claims about loading whole files: rows are accounted for, limits hold, too many bad rows stop."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_made import WriteParquet, text_ids

from rein.config.recipe import Data
from rein.data import schemas
from rein.data.loader import (
    Reject,
    load_demonstrations,
    load_pairs,
    load_prompts,
    load_trajectories,
    write_rejects,
)
from rein.data.parquet import write_rows
from rein.data.rejects import TooManyBad
from rein.data.tokenize import Encoder
from rein.errors import DataError

ONE = text_ids("1")[0]
USER = [{"role": "user", "content": "1+1="}]


def trajectory(**columns: Any) -> dict[str, Any]:
    """A row that loads: four ids with their log-probs."""
    good = {
        "prompt": "1+1=",
        "response_ids": [ONE, ONE, ONE, 1],
        "behavior_log_probs": [-0.5, -0.25, -0.125, -0.0625],
        "score": 1.0,
        "finish_reason": "stop",
        "temperature": 1.0,
    }
    return good | columns


def test_the_demo_line_of_the_manual(parquet: WriteParquet, raw: Encoder, data: Data) -> None:
    """A row whose lengths differ is named by file and row with both numbers."""
    rows = [trajectory() for _ in range(119)]
    rows[118] = trajectory(response_ids=[ONE] * 41, behavior_log_probs=[-0.5] * 40)
    loaded = load_trajectories(parquet(rows, "part-003.parquet"), raw, data, scored=True)
    assert [str(reject) for reject in loaded.rejects] == [
        "part-003.parquet row 118: 41 response_ids but 40 behavior_log_probs"
    ]
    assert (len(loaded.rows), loaded.total) == (118, 119)


@pytest.mark.parametrize(("limit", "stops"), [(0.01, True), (0.019, True), (0.02, False), (1.0, False)])
def test_more_bad_rows_than_allowed_stop_with_counts_and_the_first_three_named(
    parquet: WriteParquet, raw: Encoder, limit: float, stops: bool
) -> None:
    rows = [trajectory() for _ in range(200)]
    rows[7]["score"] = float("nan")
    rows[50]["response_ids"] = []
    rows[60]["score"] = float("nan")
    rows[199]["score"] = float("inf")
    given = Data(max_bad_fraction=limit)
    if not stops:
        loaded = load_trajectories(parquet(rows), raw, given, scored=True)
        assert (len(loaded.rows), len(loaded.rejects), loaded.total) == (196, 4, 200)
        assert loaded.notes[0].startswith("rows.parquet: left out: 4 of 200 rows (3 score not finite, 1 ")
        return
    with pytest.raises(TooManyBad) as caught:
        load_trajectories(parquet(rows), raw, given, scored=True)
    said = str(caught.value)
    assert re.fullmatch(
        r"rows\.parquet: unusable: 4 of 200 rows \(3 score not finite, 1 .*\); "
        r"first: rows\.parquet row 7: score is nan \| rows\.parquet row 50: .* \| rows\.parquet row 60: .*; "
        r"mend them or raise data\.max_bad_fraction \(0\.01.*\)",
        said,
    )
    assert caught.value.exit_code == 3
    assert len(caught.value.rejects) == 4


def test_prompts_over_the_limit_are_dropped_counted_and_named(parquet: WriteParquet, chat: Encoder) -> None:
    """Prompts of 15, 16, 17 and 400 tokens beside the template's; the limit is 16: no fault of the file."""
    bare = len(chat.prompt_ids(""))
    given = Data(max_prompt_length=bare + 16)
    rows = [{"prompt": "1" * size} for size in (15, 16, 17, 400)]
    loaded = load_prompts(parquet(rows), chat, given)
    assert [len(row.prompt_ids) for row in loaded.rows] == [bare + 15, bare + 16]
    marker = text_ids("(assistant)")
    assert all(row.prompt_ids.tolist()[-len(marker) :] == marker for row in loaded.rows)
    (note,) = loaded.notes
    assert note == (
        "rows.parquet: left out: 2 of 4 rows (2 prompt over the limit); first: "
        f"rows.parquet row 2: the prompt has {bare + 17} tokens, data.max_prompt_length is {bare + 16} | "
        f"rows.parquet row 3: the prompt has {bare + 400} tokens, data.max_prompt_length is {bare + 16}"
    )


def test_prompts_over_the_limit_are_an_error_when_asked(parquet: WriteParquet, raw: Encoder) -> None:
    rows = [{"prompt": "1" * size} for size in (15, 16, 17, 400)]
    with pytest.raises(DataError, match=r"too long: 2 of 4 rows .*; raise the limit, shorten these rows"):
        load_prompts(parquet(rows), raw, Data(max_prompt_length=16, truncation="error"))


def test_a_limit_that_leaves_nothing_is_an_error(parquet: WriteParquet, raw: Encoder) -> None:
    with pytest.raises(DataError, match=r"nothing is left: 1 of 1 rows .*; raise data\.max_prompt_length"):
        load_prompts(parquet([{"prompt": "12345"}]), raw, Data(max_prompt_length=4))


def test_a_response_over_the_limit_is_dropped_and_named(parquet: WriteParquet, raw: Encoder) -> None:
    loaded = load_trajectories(
        parquet([trajectory(), trajectory(response_ids=[ONE] * 5, behavior_log_probs=[-1.0] * 5)]),
        raw,
        Data(max_response_length=4),
    )
    assert len(loaded.rows) == 1
    assert loaded.rejects[0].reason == "the response has 5 tokens, data.max_response_length is 4"


def test_a_prompts_file_is_not_taken_for_trajectories(
    parquet: WriteParquet, raw: Encoder, data: Data
) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}]
    with pytest.raises(DataError, match=r"^rows\.parquet: no column `response`; .*; add rollout to `stages`"):
        load_trajectories(parquet(rows), raw, data)


def test_log_probs_asked_for_but_not_stored_are_answered_with_the_nearest_column(
    parquet: WriteParquet, raw: Encoder
) -> None:
    row = trajectory()
    row["behaviour_log_prob"] = row.pop("behavior_log_probs")
    with pytest.raises(DataError, match="no column `behavior_log_probs`; did you mean `behaviour_log_prob`"):
        load_trajectories(parquet([row]), raw, Data(behavior="stored"))


def test_scores_needed_but_not_stored_are_answered_with_what_to_do(
    parquet: WriteParquet, raw: Encoder, data: Data
) -> None:
    row = trajectory()
    row["reward"] = row.pop("score")
    path = parquet([row])
    with pytest.raises(DataError, match=r"no column `score`; did you mean `reward`\?.*add score to `stages`"):
        load_trajectories(path, raw, data, scored=True)
    assert load_trajectories(path, raw, data).rows[0].score is None


@pytest.mark.parametrize("loads", [load_prompts, load_trajectories, load_pairs, load_demonstrations])
def test_missing_columns_missing_files_and_files_without_rows_are_one_line(
    loads: Any, parquet: WriteParquet, jsonl: WriteParquet, raw: Encoder, data: Data, tmp_path: Path
) -> None:
    for path, said in (
        (parquet([{"question": "1", "answer": "2"}]), r"rows\.parquet: no column `\w+`"),
        (tmp_path / "absent.parquet", r"absent\.parquet: no such file"),
        (jsonl([]), "the file is empty"),
        (parquet([], "none.parquet"), r"none\.parquet: no rows"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            loads(path, raw, data)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loads", [load_prompts, load_trajectories, load_pairs, load_demonstrations])
def test_lines_that_are_no_json_are_rejected_rows_and_counted(
    loads: Any, tmp_path: Path, raw: Encoder, data: Data
) -> None:
    good = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
    if loads is load_trajectories:
        good = {"prompt": "1+1=", "response": "2"}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(good) + '\n{"prompt": \n7\n')
    loaded = loads(path, raw, data)
    assert (len(loaded.rows), loaded.total) == (1, 3)
    assert [(r.where, r.kind) for r in loaded.rejects] == [
        ("log.jsonl line 2", "unreadable"),
        ("log.jsonl row 2", "unreadable"),
    ]


@pytest.mark.parametrize("loads", [load_prompts, load_trajectories, load_pairs, load_demonstrations])
@pytest.mark.parametrize(
    "value", [7, 1.5, True, [1, 2], {"a": 1}, "", [], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}]]
)
def test_cells_of_any_wrong_type_cost_their_row_and_never_raise(
    loads: Any, value: Any, jsonl: WriteParquet, raw: Encoder, data: Data
) -> None:
    good = {"prompt": "1+1=", "response": "2", "score": 1.0}
    if loads is load_pairs:
        good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    broken = [good | {column: value} for column in good if column != "score"]
    loaded = loads(jsonl([good, *broken]), raw, data)
    assert len(loaded.rows) + len(loaded.rejects) == loaded.total == len(broken) + 1
    assert len(loaded.rows) == (2 if loads is load_prompts else 1)  # prompts do not look at the response
    assert all(reject.reason for reject in loaded.rejects)


def test_rejects_are_written_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train" / "rejects.jsonl"
    write_rejects(
        path, [Reject("a.parquet row 3", "score is nan", "score not finite"), Reject("b", "你\ud83d")]
    )
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {
        "where": "a.parquet row 3",
        "file": "a.parquet",
        "row": 3,
        "kind": "score not finite",
        "reason": "score is nan",
    }
    assert lines[1] == {"where": "b", "kind": "other", "reason": "你?"}
    write_rejects(path, [])
    assert path.read_text() == ""


def test_what_is_written_loads_as_the_same_trajectories(
    parquet: WriteParquet, chat: Encoder, data: Data, tmp_path: Path
) -> None:
    rows = [
        trajectory(
            prompt=[{"role": "system", "content": "s"}, *USER],
            reward_model={"style": "rule", "ground_truth": ["2", "2.0"]},
            data_source="made",
            extra_info={"index": 3},
            top_p=0.5,
            policy_version=4,
            behavior_policy="sft",
        ),
        trajectory(
            prompt=USER, response_ids=[ONE], behavior_log_probs=None, finish_reason="length", score=None
        ),
    ]
    first = load_trajectories(parquet(rows), chat, data)
    write_rows(
        tmp_path / "again.parquet", [schemas.trajectory_row(r) for r in first.rows], schemas.TRAJECTORIES
    )
    second = load_trajectories(tmp_path / "again.parquet", chat, data)
    for one, other in zip(first.rows, second.rows, strict=True):
        for name in one.__slots__:
            if name != "where":
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        assert one.key == other.key


def real_data() -> Path:
    here = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("REIN_DATA", here.parent / "shared" / "data"))


@pytest.mark.skipif(not real_data().is_dir(), reason="the folder of real data (REIN_DATA) is not here")
def test_gsm8ks_own_problems_load_as_they_are(raw: Encoder) -> None:
    given = Data(max_prompt_length=4096, max_response_length=4096)
    loaded = load_demonstrations(
        real_data() / "gsm8k" / "test.jsonl", raw, given, prompt_key="question", response_key="answer"
    )
    assert (len(loaded.rows), loaded.rejects) == (1319, [])
    assert "#### 18" in raw.decode_response(loaded.rows[0].response_ids)
