"""The end-to-end benchmark: its trajectories load, a run's own timings are read where there are some."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import end_to_end

from rein.config.load import load
from rein.data.parquet import read_rows


def test_the_recipe_is_one() -> None:
    recipe, _ = load(end_to_end.RECIPE, ["model.path=m", "data.train_files=rows.parquet"])
    assert recipe.actor.ppo_mini_batch_size == end_to_end.MINI
    assert recipe.data.train_batch_size == end_to_end.ROWS


def test_stored_trajectories_are_written_as_they_are(tmp_path: Path) -> None:
    batch = {
        "plen": np.array([2, 2, 3]), "rlen": np.array([1, 3, 2]), "group": np.array([0, 0, 1]),
        "prompt": np.array([7, 8, 7, 8, 1, 2, 3]), "resp": np.arange(10, 16),
        "old_logp": np.array([-1, 0.5, -2, -3, -4, -5], np.float32), "ret": np.arange(6, dtype=np.float32),
    }  # fmt: skip
    np.savez(tmp_path / "batch.npz", **batch)
    assert end_to_end.write_trajectories(tmp_path / "batch.npz", 2, tmp_path / "rows.parquet") == 2
    one, other = (row for _, row in read_rows(tmp_path / "rows.parquet"))
    assert (one["prompt_ids"], one["response_ids"], one["group"]) == ([7, 8], [10], "0")
    assert other["score"] == 3
    assert list(other["behavior_log_probs"]) == [0, -2, -3]


def run_folder(folder: Path, lines: list[dict[str, Any]], facts: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "manifest.json").write_text(json.dumps({"facts": facts}))
    return folder


def test_timings_are_summed_over_the_lines_and_a_step_is_not_counted_twice(tmp_path: Path) -> None:
    lines = [
        {"number": 0, "timing_s/ref": 2.0, "timing_s/values": 1.0},
        {"number": 4, "timing_s/values": 0.5, "timing_s/step": 9.0, "perf/throughput": 7, "perf/x": None},
    ]
    found = end_to_end.told(run_folder(tmp_path, lines, {"speed": {"outside_models": 0.2}}))
    assert found == {
        "phases": {"ref": 2.0, "values": 1.5}, "perf": {"perf/throughput": 7}, "outside_models": 0.2,
    }  # fmt: skip


def test_a_run_that_says_nothing_is_shown_with_dashes(tmp_path: Path) -> None:
    found = end_to_end.told(run_folder(tmp_path, [{"number": 1, "actor/lr": 1.0}], {}))
    row = {"name": "Rein", "cpu_seconds": 3.0, "seconds": 4.0, "peak_rss_mb": 5} | found
    assert end_to_end.cells(row) == ["Rein", "3.0", "4.0", 5, *["-"] * len(end_to_end.PHASES), "-"]


def test_what_no_phase_holds_is_the_rest() -> None:
    phases = {"ref": 1.0, end_to_end.BOTH: 2.0}
    row = {"name": "TRL", "cpu_seconds": 3.0, "seconds": 4.0, "peak_rss_mb": 5, "phases": phases}
    assert end_to_end.cells(row)[-1] == "1.0"
    assert "2.0" in end_to_end.cells(row)


def test_a_process_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"exit 1\n.*no such job"):
        end_to_end.measured([sys.executable, "-c", "raise SystemExit('no such job')"], tmp_path)
