"""The score stage on small files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rein.config.recipe import Recipe
from rein.errors import DataError
from rein.stages import score
from rein.tracking.console import Console

TRUTH = {"style": "rule", "ground_truth": "605"}


def recipe(tiny: Path, out: Path, file: Path, reward: Any, **data: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "out": str(out),
            "model": {"path": str(tiny)},
            "data": data,
            "score": {"files": str(file), "reward": reward},
        }
    )


def rejects(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "score" / "rejects.jsonl").read_text().splitlines()]


EXACT = {"name": "exact", "options": {"marker": "#"}}


def test_everything_in_the_file_stays_and_a_score_is_added(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    ids = [[17, 9, 3, 8, 1], [17, 9, 3, 9, 1], [17, 9, 3, 8]]
    rows = [
        {
            "prompt": "347+258=",
            "response_ids": row,
            "behavior_log_probs": [-0.5] * len(row),
            "temperature": 0.7,
            "finish_reason": "stop" if row[-1] == 1 else "length",
            "score": 0.25,
            "baseline_score": 0.125,
            "ability": "math",
            "reward_model": {"style": "mine", "ground_truth": "605"},
            "extra_info": {"index": i},
            "my column": {"note": f"row {i}"},
            "tools": [{"type": "function", "function": {"name": f"f{i}"}}],
        }
        for i, row in enumerate(ids)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    facts = score.run(recipe(tiny, tmp_path / "out", file, EXACT), Console(quiet=True))
    table = pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet")
    written = table.to_pylist()
    assert [row["score"] for row in written] == [1.0, 0.0, 1.0]
    assert [row["response_ids"] for row in written] == ids
    assert [row["response"] for row in written] == ["#605", "#606", "#605"]
    for before, after in zip(rows, written, strict=True):
        for column in (
            "prompt",
            "temperature",
            "finish_reason",
            "baseline_score",
            "ability",
            "reward_model",
            "tools",
        ):
            assert after[column] == before[column]
        assert after["extra_info"] == before["extra_info"]
        assert after["my column"] == before["my column"]
        np.testing.assert_array_equal(
            np.float32(after["behavior_log_probs"]), np.float32(before["behavior_log_probs"])
        )
    assert facts["rows"] == {"in": 3, "rejected": 0, "scored": 3}
    assert facts["score/mean"] == pytest.approx(2 / 3)
    assert facts["score/exact/mean"] == pytest.approx(2 / 3)


def test_rows_without_a_truth_are_rejected_and_every_row_is_accounted_for(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1=", "response": "#2", "reward_model": {"ground_truth": "2"}} for _ in range(8)]
    rows[3]["reward_model"] = {"ground_truth": None}  # type: ignore[dict-item]
    rows[5]["response"] = ""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = score.run(recipe(tiny, tmp_path / "out", file, EXACT, max_bad_fraction=0.5), Console(quiet=True))
    assert facts["rows"] == {"in": 8, "rejected": 2, "scored": 6}
    left_out = {row["where"]: row["reason"] for row in rejects(tmp_path / "out")}
    assert left_out["rows.jsonl row 3"] == "no ground truth that exact can use"
    assert "no tokens" in left_out["rows.jsonl row 5"]
    assert pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet").num_rows == 6


def test_too_many_rows_without_a_score_stop_the_stage_and_are_written_down(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "response": "#2"}) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl.*no ground truth that exact can use"):
        score.run(recipe(tiny, tmp_path / "out", file, EXACT), Console(quiet=True))
    assert len(rejects(tmp_path / "out")) == 1
    assert not (tmp_path / "out" / "score" / "trajectories.parquet").exists()


def test_preference_pairs_become_two_scored_rows_each(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    row = {"prompt": "1+1=", "chosen": "#2", "rejected": "#3", "reward_model": TRUTH, "note": "kept"}
    row["reward_model"] = {"ground_truth": "2"}
    file.write_text(json.dumps(row) + "\n")
    score.run(recipe(tiny, tmp_path / "out", file, EXACT), Console(quiet=True))
    written = pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet").to_pylist()
    assert [(r["response"], r["score"], r["note"]) for r in written] == [
        ("#2", 1.0, "kept"),
        ("#3", 0.0, "kept"),
    ]


def test_the_reward_model_is_asked_once_and_its_scores_are_kept(tiny: Path, tmp_path: Path) -> None:
    from rein.models.reward_model import load_reward_model

    model = load_reward_model(str(tiny))
    model.model.score.weight.data.fill_(0.1)
    model.save(tmp_path / "reward")
    file = tmp_path / "rows.jsonl"
    texts = ["#2", "#3", "1+1=2#2", "#2"]
    file.write_text("".join(json.dumps({"prompt": "1+1=", "response": text}) + "\n" for text in texts))
    base = recipe(
        tiny, tmp_path / "out", file, ["model", {"name": "length", "weight": 0.5, "options": {"slope": 1}}]
    )
    changed = base.model_copy(
        update={"score": base.score.model_copy(update={"path": str(tmp_path / "reward")})}
    )
    first = score.run(changed, Console(quiet=True))
    written = pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet").to_pylist()
    scores = [row["score"] for row in written]
    assert len(set(scores)) == 3
    assert scores[0] == scores[3]
    second = score.run(changed, Console(quiet=True))
    assert second["cache"] == {"hits": 4, "misses": 0}
    assert second["score/mean"] == first["score/mean"]
    assert [
        r["score"] for r in pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet").to_pylist()
    ] == scores


def test_times_decimals_and_maps_of_the_user_stay(tiny: Path, tmp_path: Path) -> None:
    """pandas writes times in nanoseconds, which plain pyarrow cannot turn into Python's."""
    when = [1_700_000_000_123_456_789, None]
    table = pa.table(
        {
            "prompt": ["1+1=", "1+2="],
            "response": ["#2", "#3"],
            "ground_truth": ["2", "2"],
            "created": pa.array(when, type=pa.timestamp("ns", "UTC")),
            "price": pa.array(["1.50", None]).cast(pa.decimal128(8, 2)),
            "tags": pa.array([[("a", "1")], None], type=pa.map_(pa.string(), pa.string())),
            "mixed": ['{"at": 1}', None],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    score.run(recipe(tiny, tmp_path / "out", tmp_path / "rows.parquet", EXACT), Console(quiet=True))
    one, two = pq.read_table(tmp_path / "out" / "score" / "trajectories.parquet").to_pylist()
    assert (one["score"], two["score"]) == (1.0, 0.0)
    assert one["created"].isoformat() == "2023-11-14T22:13:20.123456+00:00"
    assert (str(one["price"]), one["tags"], one["mixed"]) == ("1.50", {"a": "1"}, '{"at": 1}')
    assert (two["created"], two["price"]) == (None, None)
