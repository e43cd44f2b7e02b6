"""Commands as printed, rehearsed and repeated: the articles' example line, --try, the same folder twice."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from e2e_run import drafts, manifest, metrics, recipe, rein, write_recipe

EXAMPLE = (
    "data.train_batch_size=256 actor.optim.lr=1e-6 actor.ppo_mini_batch_size=64 "
    "algorithm.kl_ctrl.kl_coef=0.001 algorithm.clip_ratio=0.2 reward_manager.clip_range=[-2,2]"
)


def scored_rows(file: Path, prompts: int) -> Path:
    rows = [
        {"prompt": f"{p}+7=", "response": f"#{p + i * 7}", "score": float(p % 7 - 3 + i)}
        for p in range(100, 100 + prompts)
        for i in range(4)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train_recipe(whole: Path, data: Path, out: Path) -> dict[str, Any]:
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    body["data"]["train_files"] = str(whole / "score" / "trajectories.parquet")
    return body


def test_the_printed_example_line_runs_as_printed(tiny: Path, data: Path, tmp_path: Path) -> None:
    rows = scored_rows(tmp_path / "rows.jsonl", 128)
    body = {
        "out": str(tmp_path / "run"),
        "threads": 1,
        "model": {"path": str(tiny)},
        "data": {"train_files": str(rows)},
        "trainer": {"critic_warmup": 10, "val_prompts": 8},
        "evaluate": {"reward": {"name": "length"}},
    }
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body), *EXAMPLE.split()) == 0
    lines = metrics(tmp_path / "run")
    assert manifest(tmp_path / "run", "train")["rows"]["trained"] == 256
    settings = manifest(tmp_path / "run", "train")["recipe"]
    assert settings["actor"]["clip_ratio"] == 0.2
    assert settings["actor"]["optim"]["lr"] == 1e-6
    first = next(line for line in lines if "critic/score/max" in line)
    assert (first["critic/score/min"], first["critic/score/max"]) == (-2, 2)
    assert all(line["actor/kl_coef"] == 0.001 for line in lines if "actor/kl_coef" in line)
    assert sum("actor/lr" in line for line in lines) == 4 * 256 // 64  # 4 epochs of mini-batches of 64 rows


def tree(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("stages", [["train"], ["sft", "reward", "rollout", "score", "train", "evaluate"]])
def test_a_rehearsal_updates_and_leaves_nothing_behind(
    stages: list[str], whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = train_recipe(whole, data, tmp_path / "runs" / "first") | {"stages": stages}
    body["reward"] = {"files": str(data / "pairs.parquet"), "batch_size": 16}
    body["rollout"]["max_prompts"] = 96
    file = write_recipe(tmp_path / "recipe.yaml", body)
    before, theirs = tree(tmp_path), tree(whole)
    assert rein("check", file, "--try") == 0
    said = capsys.readouterr().out
    assert "two updates on 16 of the rows made and thrown away" in said
    assert "  actor/pg_loss " in said
    assert "  critic/vf_loss " in said
    assert tree(tmp_path) == before
    assert tree(whole) == theirs
    assert drafts(tmp_path) == []


def test_a_finished_run_makes_room_for_other_settings(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "run"))
    assert rein("train", file) == 0
    capsys.readouterr()
    assert rein("train", file, "actor.optim.lr=2e-3") == 0
    assert "the run finished here had other settings; starting anew" in capsys.readouterr().out
    assert {line["actor/lr"] for line in metrics(tmp_path / "run") if "actor/lr" in line} == {2e-3}


def test_an_unfinished_run_is_not_thrown_away_for_other_settings(
    whole: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e2e_impatient.py").write_text(
        "import os\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    os.kill(os.getpid(), {int(signal.SIGTERM)})\n"
        "    return 1.0\n"
    )
    body = train_recipe(whole, data, tmp_path / "run")
    body["evaluate"]["reward"] = {"name": "e2e_impatient:score"}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 143
    left = tree(tmp_path / "run" / "train" / "snapshots")
    assert left
    capsys.readouterr()
    assert rein("train", file, "actor.optim.lr=2e-3") == 6
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "an unfinished run with other settings" in err
    assert "resume=never" in err
    assert tree(tmp_path / "run" / "train" / "snapshots") == left
    assert rein("train", file, "actor.optim.lr=2e-3", "resume=never", "evaluate.reward=math") == 0
