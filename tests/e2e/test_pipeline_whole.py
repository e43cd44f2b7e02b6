"""Every stage through the command line: rows accounted for, ratio 1 at the start, done work skipped."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from e2e_run import STAGES, drafts, manifest, metrics, recipe, rein, same_weights, write_recipe


def test_one_command_leaves_every_result_and_no_draft(whole: Path) -> None:
    for name in (
        "summary.json",
        "recipe.json",
        "report.html",
        "sft/model/model.safetensors",
        "rollout/trajectories.parquet",
        "score/trajectories.parquet",
        "train/best/model.safetensors",
        "train/last/model.safetensors",
        "train/critic/model.safetensors",
        "train/metrics.jsonl",
        "evaluate/evaluation.json",
        "evaluate/answers.parquet",
        "export/model/model.safetensors",
    ):
        assert (whole / name).is_file(), name
    assert drafts(whole) == []
    summary = json.loads((whole / "summary.json").read_text())
    assert {"before", "after", "lift", "lift_ci95", "seconds"} <= set(summary)
    assert list(summary["stages"]) == STAGES


def test_rows_in_are_rows_used_plus_rejected(whole: Path) -> None:
    rows = {stage: manifest(whole, stage)["rows"] for stage in STAGES}
    assert rows["sft"] == {"in": 96, "rejected": 0, "trained": 96}
    assert rows["rollout"] == {"in": 96, "rejected": 0, "prompts": 96, "trajectories": 192}
    assert rows["score"] == {"in": 192, "rejected": 0, "scored": 192}
    assert rows["train"] == {"in": 192, "rejected": 0, "held_out": 96, "trained": 96}
    assert rows["evaluate"] == {"in": 12, "rejected": 0, "judged": 12}
    assert pq.read_table(whole / "score" / "trajectories.parquet").num_rows == 192


def test_before_the_first_update_the_ratio_is_one_and_no_kl_is_paid(whole: Path) -> None:
    lines = metrics(whole)
    probes = [line["probe/kl_reference"] for line in lines if "probe/kl_reference" in line]
    assert probes[0] == 0
    assert probes[-1] > 0
    first = next(line for line in lines if "actor/pg_clipfrac" in line)
    assert first["actor/pg_clipfrac"] == first["actor/pg_clipfrac_lower"] == 0
    assert abs(first["actor/ppo_kl"]) < 1e-6
    of_the_data = next(line for line in lines if "training/log_prob_diff_max" in line)
    assert of_the_data["training/log_prob_diff_max"] < 1e-3
    assert manifest(whole, "rollout")["facts"]["log_prob_diff_max"] < 1e-3


def test_a_second_run_skips_every_stage(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {stage: (whole / stage / "manifest.json").stat().st_mtime_ns for stage in STAGES}
    assert rein("run", whole.parent / "recipe.yaml") == 0
    said = capsys.readouterr().out
    for stage in STAGES:
        assert f"{stage}: done before" in said
    assert before == {stage: (whole / stage / "manifest.json").stat().st_mtime_ns for stage in STAGES}


def test_a_changed_setting_reruns_only_what_depends_on_it(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = recipe(tiny, data, tmp_path / "run") | {"stages": ["sft", "rollout", "score", "train"]}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    capsys.readouterr()
    for word, kept in (
        ("reward_manager.clip_range=[0,0.5]", ["sft", "rollout", "score"]),
        ("rollout.temperature=0.9", ["sft"]),
        ("sft.total_steps=2", []),
    ):
        assert rein("run", file, word) == 0
        said = capsys.readouterr().out
        assert [stage for stage in body["stages"] if f"{stage}: done before" in said] == kept


def test_the_seed_decides_the_weights_bit_for_bit(
    whole: Path, tiny: Path, data: Path, tmp_path: Path
) -> None:
    body = recipe(tiny, data, tmp_path / "again") | {"stages": ["sft", "rollout", "score", "train"]}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    for model in ("sft/model", "train/best", "train/last", "train/critic"):
        assert same_weights(whole / model, tmp_path / "again" / model), model
    assert rein("run", file, "seed=1", f"out={tmp_path}/other") == 0
    assert not same_weights(whole / "train" / "last", tmp_path / "other" / "train" / "last")
