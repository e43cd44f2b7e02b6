"""Ctrl-C and SIGTERM, sent for real: state saved, the way on said, the end the same bit for bit."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_run import drafts, metrics, recipe, rein, rein_apart, same_weights, write_recipe

from rein.tracking.jsonl import untimed

FIT, CRITIC, ACTOR = 20, 12, 96  # updates: the critic alone, then 12 and 8 x 12 mini-batches of 8 rows


def train_recipe(whole: Path, data: Path, out: Path) -> dict[str, Any]:
    """One batch of many small updates, so that a signal comes in the middle of it."""
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    body["data"] |= {"train_files": str(whole / "score" / "trajectories.parquet"), "train_batch_size": 96}
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 8}
    body["trainer"] = {"critic_warmup": FIT, "total_epochs": 1}
    body["critic"] |= {"fit_until": 1.0, "ppo_epochs": 1}
    return body


def wait_for(out: Path, stage: str, reached: int, going_on: Callable[[], bool]) -> None:
    """Until the metrics show that many updates."""
    while going_on() and not any(line["number"] >= reached for line in metrics(out, stage)):
        time.sleep(0.01)


def signalled_apart(file: str, number: int, out: Path, reached: int) -> tuple[int, str]:
    """`rein train` as its own process, and a signal in the middle: the exit code and stderr."""
    process = rein_apart("train", file)
    wait_for(out, "train", reached, lambda: process.poll() is None)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def signalled_here(verb: str, file: str, number: int, out: Path, reached: int) -> int:
    """The same in this process, which a signal that comes too late must not end."""
    over = threading.Event()

    def send() -> None:
        wait_for(out, verb, reached, lambda: not over.is_set())
        os.kill(os.getpid(), number)

    former = signal.signal(number, lambda *_: None)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        code = rein(verb, file)
        over.set()
        sender.join()
        return code
    finally:
        signal.signal(number, former)


def numbers(out: Path, stage: str) -> list[dict[str, Any]]:
    return untimed(metrics(out, stage))


def test_train_goes_on_from_critic_fitting_and_from_mid_batch(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, mid, total = tmp_path / "run", FIT + CRITIC + 10, FIT + CRITIC + ACTOR
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, out))
    assert signalled_here("train", file, signal.SIGTERM, out, 3) == 143
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "state saved; the same command goes on from here" in err
    assert 3 <= metrics(out)[-1]["number"] < FIT
    assert not (out / "train" / "manifest.json").exists()

    code, err = signalled_apart(file, signal.SIGINT, out, mid)
    assert code == 130, err
    assert err.count("\n") == 1
    assert "state saved; the same command goes on from here" in err
    assert mid <= metrics(out)[-1]["number"] < total

    assert rein("train", file) == 0
    assert f"of {total}" in capsys.readouterr().out
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    for model in ("best", "last", "critic"):
        assert same_weights(out / "train" / model, tmp_path / "unbroken" / "train" / model), model
    assert numbers(out, "train") == numbers(tmp_path / "unbroken", "train")
    assert drafts(out) == []


def test_sft_goes_on_to_the_same_weights(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    body = recipe(tiny, data, out) | {"stages": ["sft"]}
    body["sft"] |= {"total_steps": 60}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert signalled_here("sft", file, signal.SIGINT, out, 3) == 130
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "the same command goes on from here" in err
    assert 3 <= metrics(out, "sft")[-1]["number"] < 60
    assert not (out / "sft" / "model").exists()
    assert rein("sft", file) == 0
    assert rein("sft", file, f"out={tmp_path}/unbroken") == 0
    assert same_weights(out / "sft" / "model", tmp_path / "unbroken" / "sft" / "model")
    assert numbers(out, "sft") == numbers(tmp_path / "unbroken", "sft")


def test_sigterm_amid_your_function_is_not_its_fault(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = recipe(tiny, data, tmp_path / "run") | {"stages": ["score"]}
    reward = {"name": "slowly:length", "options": {"log": str(tmp_path / "log"), "fail": "signal"}}
    body["score"] = {"files": str(data / "pairs.parquet"), "reward": reward}
    assert rein("score", write_recipe(tmp_path / "recipe.yaml", body)) == 143
    assert capsys.readouterr().err == (
        "error: terminated: finished stages are kept; the same command goes on from there\n"
    )
    assert drafts(tmp_path) == []
