"""`rein check` refuses weights that are not as long as their headers say, before training opens them."""

import json
import shutil
from pathlib import Path

import pytest
from rows_made import random_trajectories

from rein.cli import main
from rein.commands.check_shapes import refuse_damaged
from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import CheckpointError
from rein.models.critic import load_critic

CHANGES = {  # of a file, with the bytes before its numbers
    "middle": lambda whole, begin: whole[: (begin + len(whole)) // 2],
    "one short": lambda whole, begin: whole[:-1],
    "one more": lambda whole, begin: whole + b"0",
    "header": lambda whole, begin: whole[: begin // 2],
    "start": lambda whole, begin: whole[:4],
    "nothing": lambda whole, begin: b"",
    "pointer": lambda whole, begin: b"version https://git-lfs.github.com/spec/v1\n",
    "list": lambda whole, begin: (2).to_bytes(8, "little") + b"[]",
}
OF_SIZE = {"middle", "one short", "one more"}  # with a header that can be read


@pytest.fixture
def folder(tiny_lm: str, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_lm, tmp_path / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.parquet", map(trajectory_row, random_trajectories(64)), TRAJECTORIES, {})
    return tmp_path / "rows.parquet"


def damage(file: Path, change: str) -> None:
    whole = file.read_bytes()
    file.write_bytes(CHANGES[change](whole, 8 + int.from_bytes(whole[:8], "little")))


def recipe(tiny_lm: str, rows: Path, critic: Path) -> Recipe:
    return load(None, [f"model.path={tiny_lm}", f"data.train_files={rows}", f"critic.model.path={critic}"])[0]


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_are_not_whole_are_refused(change: str, tiny_lm: str, folder: Path, rows: Path) -> None:
    some = recipe(tiny_lm, rows, folder)
    refuse_damaged(some)
    damage(folder / "model.safetensors", change)
    said = "has .* bytes, its header says" if change in OF_SIZE else "cannot be read"
    with pytest.raises(CheckpointError, match=rf"model/model\.safetensors: {said}.*; copy it anew") as caught:
        refuse_damaged(some)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        load_critic(str(folder))  # as train would say


def test_the_command_ends_as_training_would(
    folder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.path={folder}", f"data.train_files={rows}", f"out={tmp_path}/run"]
    words += ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "data.holdout_fraction=0"]
    assert main(["check", *words]) == 0
    damage(folder / "model.safetensors", "middle")
    assert main(["check", *words]) == main(["train", *words]) == CheckpointError.exit_code == 6
    assert "model.safetensors: has " in capsys.readouterr().err


def test_an_adapter_counts_with_its_base(tiny_lm: str, folder: Path, rows: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    shutil.copy(folder / "model.safetensors", adapter / "adapter_model.safetensors")
    some = recipe(tiny_lm, rows, adapter)
    refuse_damaged(some)
    for file in (adapter / "adapter_model.safetensors", folder / "model.safetensors"):
        whole = file.read_bytes()
        damage(file, "middle")
        with pytest.raises(CheckpointError, match=f"{file.name}: has "):
            refuse_damaged(some)
        file.write_bytes(whole)
    refuse_damaged(some)


def test_one_of_several_files_is_enough(tiny_lm: str, folder: Path, rows: Path) -> None:
    for number in (1, 2):
        shutil.copy(folder / "model.safetensors", folder / f"model-0000{number}-of-00002.safetensors")
    damage(folder / "model-00002-of-00002.safetensors", "one short")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: has "):
        refuse_damaged(recipe(tiny_lm, rows, folder))
