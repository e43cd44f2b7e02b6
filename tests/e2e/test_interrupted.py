"""Ctrl-C and SIGTERM, sent to a real process: state saved, the way on said, the end the same bit for bit."""

import signal
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from e2e_run import drafts, metrics, recipe, rein, rein_apart, same_weights, write_recipe

FIT = 40


def train_recipe(whole: Path, data: Path, out: Path) -> dict[str, Any]:
    """One batch of many small updates, so that a signal comes in the middle of it."""
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    body["data"] |= {"train_files": str(whole / "score" / "trajectories.parquet"), "train_batch_size": 96}
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 8}
    body["trainer"] = {"critic_warmup": FIT, "total_epochs": 1}
    body["critic"] |= {"fit_until": 1.0}
    return body


def signalled(process: "Popen[str]", number: int, out: Path, stage: str, reached: int) -> tuple[int, str]:
    """Send the signal when the metrics show that many updates; the exit code and stderr."""
    until = time.monotonic() + 60
    while not any(line["number"] >= reached for line in metrics(out, stage)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def numbers(out: Path, stage: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in metrics(out, stage)]


def test_train_goes_on_from_critic_fitting_and_from_mid_batch(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, out))
    code, err = signalled(rein_apart("train", file), signal.SIGINT, out, "train", 3)
    assert code == 130
    assert err.count("\n") == 1
    assert "state saved; the same command goes on from here" in err
    assert 3 <= metrics(out)[-1]["number"] < FIT
    assert not (out / "train" / "manifest.json").exists()

    code, err = signalled(rein_apart("train", file), signal.SIGTERM, out, "train", FIT + 120)
    assert code == 143
    assert err.count("\n") == 1
    assert "state saved; the same command goes on from here" in err
    assert FIT + 120 <= metrics(out)[-1]["number"] < FIT + 192

    assert rein("train", file) == 0
    assert f"of {FIT + 192}" in capsys.readouterr().out
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    for model in ("best", "last", "critic"):
        assert same_weights(out / "train" / model, tmp_path / "unbroken" / "train" / model), model
    assert numbers(out, "train") == numbers(tmp_path / "unbroken", "train")
    assert drafts(out) == []


def test_sft_goes_on_to_the_same_weights(tiny: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    body = recipe(tiny, data, out) | {"stages": ["sft"]}
    body["sft"] |= {"total_steps": 60}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    code, err = signalled(rein_apart("sft", file), signal.SIGINT, out, "sft", 3)
    assert code == 130
    assert err.count("\n") == 1
    assert "the same command goes on from here" in err
    assert 3 <= metrics(out, "sft")[-1]["number"] < 60
    assert not (out / "sft" / "model").exists()
    assert rein("sft", file) == 0
    assert rein("sft", file, f"out={tmp_path}/unbroken") == 0
    assert same_weights(out / "sft" / "model", tmp_path / "unbroken" / "sft" / "model")
    assert numbers(out, "sft") == numbers(tmp_path / "unbroken", "sft")
