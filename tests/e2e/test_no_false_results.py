"""What must never pass for a result: weights that are not finite, a start that never moved, half a run."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_run import Refuse, recipe, rein, same_weights, write_recipe


def stored(whole: Path, data: Path, out: Path, score: float | None = None) -> dict[str, Any]:
    """Train alone on the scored rows of the whole run; `score`: what the first of each two rows scores."""
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    file = whole / "score" / "trajectories.parquet"
    if score is not None:
        table = pq.read_table(file)
        scores = pa.array([score if i % 2 == 0 else -score for i in range(table.num_rows)], pa.float64())
        file = out.parent / "rows.parquet"
        pq.write_table(table.set_column(table.schema.get_field_index("score"), "score", scores), file)
    body["data"]["train_files"] = str(file)
    body["trainer"] |= {"val_before_train": False, "total_training_steps": 1}
    return body


@pytest.mark.parametrize("who", ["actor", "critic"])
def test_weights_that_are_not_finite_are_not_written(
    who: str, whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    body = stored(whole, data, out)
    body[who] |= {"optim": {"lr": "1e39"}, "ppo_mini_batch_size": 48, "ppo_epochs": 1}
    body["guards"] = {"preset": "off"}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 4
    said = capsys.readouterr().err
    assert "not finite" in said
    assert "learning rate" in said
    assert not (out / "train" / "manifest.json").exists()
    assert not (out / "train" / "last").exists()


def test_with_guards_weights_that_are_not_finite_are_taken_back_until_the_run_pauses(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    body = stored(whole, data, out)
    body["actor"] |= {"optim": {"lr": "1e39"}, "ppo_mini_batch_size": 48, "ppo_epochs": 1}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 4
    said = capsys.readouterr().err
    assert "probe/kl_reference is nan; rollback 4, guards.max_rollbacks is 3: paused" in said
    assert not (out / "train" / "manifest.json").exists()
    assert same_weights(out / "train" / "last", whole / "sft" / "model")


def test_a_start_that_never_moved_is_no_result(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = stored(whole, data, tmp_path / "run", score=3e38) | {"guards": {"preset": "off"}}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 4
    assert "were skipped, as not finite" in capsys.readouterr().err
    assert not (tmp_path / "run" / "train" / "manifest.json").exists()


def test_a_killed_train_has_no_result_to_export(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole / "train" / "best", out / "train" / "best")
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train", "evaluate", "export"]}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    for verb, key in (("evaluate", "evaluate.after"), ("export", "export.path")):
        assert rein(verb, file) == 2
        assert f"train has not finished in {out}" in capsys.readouterr().err
        assert rein(verb, file, f"{key}={out}/train/best") == 0


def test_export_never_replaces_what_is_no_model(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["export"]}
    body["export"] = {"path": str(whole / "train" / "best")}
    file, mine = write_recipe(tmp_path / "recipe.yaml", body), tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for target in (mine, mine / "thesis.txt", tmp_path):
        assert rein("export", file, f"export.to={target}") == 2
        assert "which would be lost" in capsys.readouterr().err
    assert (mine / "thesis.txt").read_text() == "years of work"
    for _ in range(2):  # a new folder, then the same one again
        assert rein("export", file, f"export.to={tmp_path}/model", "seed=1") == 0


def test_a_reward_that_exits_is_the_function_s_fault(
    whole: Path, data: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaver.py").write_text("import sys\ndef leave(**row):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    body = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["score"]}
    body["score"] = {"reward": "leaver:leave", "files": str(whole / "rollout" / "trajectories.parquet")}
    assert "raised SystemExit (0)" in refuse(8, "score", body)


def test_a_score_that_is_not_finite_is_refused(
    whole: Path, data: Path, tmp_path: Path, refuse: Refuse
) -> None:
    body = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["score"]}
    body["score"] = {
        "reward": [{"name": "length", "weight": 1e308, "options": {"target": 1, "slope": 1e10}}],
        "files": str(whole / "rollout" / "trajectories.parquet"),
    }
    assert "correct weights and options" in refuse(2, "score", body)


def test_an_empty_name_is_no_folder(whole: Path, data: Path, tmp_path: Path, refuse: Refuse) -> None:
    body = stored(whole, data, tmp_path / "run")
    body["data"]["train_files"] = ""
    assert "data.train_files" in refuse(2, "train", body)
