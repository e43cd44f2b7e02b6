"""Damaged models, full disks and folders that cannot be written: exit 6, one line, nothing half-written."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_run import Refuse, recipe, rein, weights, write_recipe
from safetensors.torch import save_file

from rein.snapshots import Snapshots

Body = dict[str, Any]
WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def body(whole: Path, data: Path, tmp_path: Path) -> Body:
    """Every stage can be run from it by itself."""
    made = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["train"]}
    made["data"]["train_files"] = str(whole / "score" / "trajectories.parquet")
    made["reward"] = {"files": str(data / "pairs.parquet"), "batch_size": 16}
    made["evaluate"] |= {"before": made["model"]["path"], "after": made["model"]["path"]}
    made["export"] = {"path": made["model"]["path"]}
    return made


def copied(model: Path, target: Path, damage: Callable[[Path], None]) -> str:
    shutil.copytree(model, target)
    damage(target)
    return str(target)


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()


def without_a_weight(model: Path) -> None:
    kept = {name: tensor for name, tensor in weights(model).items() if name != WEIGHT}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def with_a_nan(model: Path) -> None:
    found = weights(model)
    found[WEIGHT][0, 0] = math.nan
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})


def with_broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize("verb", ["sft", "rollout", "train"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "cannot be loaded (Error while deserializing header"),
        (without_tokenizer, "holds no tokenizer"),
        (without_a_weight, f"cannot be loaded (1 weights are missing, first {WEIGHT})"),
        (with_a_nan, "gives log-probs that are not finite"),
        (with_broken_config, "config.json' is not a valid JSON file"),
    ],
)
def test_a_damaged_start_model_exits_6(
    damage: Callable[[Path], None],
    said: str,
    verb: str,
    body: Body,
    tiny: Path,
    refuse: Refuse,
    tmp_path: Path,
) -> None:
    body |= {"stages": [verb], "model": {"path": copied(tiny, tmp_path / "model", damage)}}
    if (damage, verb) == (with_broken_config, "rollout"):  # reads it without transformers
        said = "config.json: cannot be read (Expecting value: line 1 column 16"
    message = refuse(6, verb, body)
    assert said in message
    assert f"{tmp_path}/model" in message


def test_a_reward_model_that_says_nan_exits_7(
    body: Body, tiny: Path, whole: Path, refuse: Refuse, tmp_path: Path
) -> None:
    body |= {"stages": ["score"]}
    body["score"] = {"reward": "model", "path": copied(tiny, tmp_path / "model", with_a_nan)}
    body["score"]["files"] = str(whole / "rollout" / "trajectories.parquet")
    assert "trajectories.parquet row 0: the reward model scores it nan" in refuse(7, "score", body)


@pytest.mark.parametrize(
    ("verb", "size"),
    [
        *(("sft", "64k"), ("sft", "120k"), ("reward", "64k"), ("rollout", "16k"), ("score", "8k")),
        *(("evaluate", "4k"), ("export", "64k"), ("run", "4k")),
    ],
)
def test_a_full_disk_exits_6(
    verb: str, size: str, body: Body, whole: Path, refuse: Refuse, disk: Callable[[str], Path]
) -> None:
    body |= {"out": str(disk(f"size={size}") / "run")}
    body["stages"] = ["sft"] if verb == "run" else [verb]
    body["score"] |= {"files": str(whole / "rollout" / "trajectories.parquet")}
    message = refuse(6, verb, body)
    assert "No space left" in message or "errno 28" in message


def test_a_disk_that_fills_up_in_training_keeps_what_was_whole(
    body: Body, disk: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = disk("size=400k") / "run"
    body |= {"out": str(out)}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 6
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(r"snapshots/step-[1-9]\d*: cannot be saved .* older ones stay: step-0", err)
    assert all(bool(tensor.isfinite().all()) for tensor in weights(out / "train" / "best").values())
    state, passed_over = Snapshots(out / "train" / "snapshots").newest()
    assert passed_over == []
    assert state is not None
    assert state.meta["cursor"]["number"] == 0  # the rollback point that was whole


def test_a_folder_that_cannot_be_written_exits_6_before_any_work(
    body: Body, refuse: Refuse, disk: Callable[[str], Path], tmp_path: Path
) -> None:
    body |= {"out": str(tmp_path / "file" / "run")}
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file is a file; choose another out=" in refuse(6, "train", body)
    body |= {"out": str(disk("size=64k,ro") / "run")}
    assert "cannot be written to; change its permissions or choose another out=" in refuse(6, "train", body)
