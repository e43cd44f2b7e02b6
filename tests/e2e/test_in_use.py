"""A folder that a run is at work in: a second run is refused, a report is not, a kill leaves it free."""

import json
import os
import time
from pathlib import Path

import pytest
from e2e_run import drafts, metrics, recipe, rein, rein_apart, write_recipe

pytestmark = pytest.mark.long


def test_two_runs_never_share_a_folder(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["sft"]}
    body["sft"]["total_steps"] = 100_000
    file = write_recipe(tmp_path / "recipe.yaml", body)
    first = rein_apart("run", file)
    while first.poll() is None and not metrics(out, "sft"):
        time.sleep(0.02)
    for verb in ("run", "sft", "score"):
        assert rein(verb, file, f"score.files={whole}/rollout/trajectories.parquet") == 6
        said = capsys.readouterr().err
        assert f"out: {out} is in use by process {first.pid} on " in said
        assert "; wait for it or choose another out=" in said
        assert said.count("\n") == 1
    assert rein("report", file) == 0
    assert first.poll() is None
    first.kill()
    first.communicate()

    assert rein("sft", file, "sft.total_steps=2") == 0
    assert drafts(out) == []


def test_a_demo_holds_its_folder_while_it_makes_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    first = rein_apart("demo", f"out={out}")
    while first.poll() is None and not (out / ".lock").exists():
        time.sleep(0.005)
    assert not (out / "base").exists()
    assert rein("demo", f"out={out}") == 6
    assert f"in use by process {first.pid}" in capsys.readouterr().err
    assert json.loads((out / ".lock").read_text())["pid"] == first.pid != os.getpid()
    first.kill()
    first.communicate()
