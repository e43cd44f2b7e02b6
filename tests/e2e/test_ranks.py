"""What one process trains, several train too that FSDP2 cuts the models over: the same numbers and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_run import OFFLINE, ROOT, drafts, metrics, recipe, rein, rein_apart, weights, write_recipe
from many_run import far, gone, losses, ranks_of, train_recipe, weights_apart
from transformers import AutoModelForCausalLM

from rein.journal import read

pytestmark = pytest.mark.long

WORDS = ("runtime=fsdp", "nproc=2")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param({}, id="plain"),
        pytest.param({"lora_rank": 4}, id="lora", marks=pytest.mark.slow),
        pytest.param({"enable_gradient_checkpointing": True}, id="checkpointing", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one_process(
    whole: Path, data: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "one", **model))
    assert rein("train", file) == 0
    assert rein("train", file, *WORDS, f"out={tmp_path}/two") == 0
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "two")) < 1e-9
    for folder in ("last", "critic"):
        assert weights_apart(tmp_path / "one" / "train" / folder, tmp_path / "two" / "train" / folder) < 1e-9
    assert drafts(tmp_path / "two") == []
    assert "lm_head.weight" not in weights(tmp_path / "two" / "train" / "last")  # one matrix for both ends
    tied = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "train" / "last")
    assert tied.lm_head.weight.data_ptr() == tied.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks_that_share_every_pack(whole: Path, data: Path, tmp_path: Path, ranks: int) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "one"))
    assert rein("train", file) == 0
    words = ("runtime=fsdp", f"nproc={ranks}", "fsdp.ulysses_sequence_parallel_size=2", "trainer.profile=[1]")
    assert rein("train", file, *words, f"out={tmp_path}/two") == 0
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "two")) < 1e-9
    assert (tmp_path / "two" / "train" / "profile" / "step-1.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_float32_too(whole: Path, data: Path, tmp_path: Path, ranks: int) -> None:
    body = train_recipe(whole, data, tmp_path / "one", dtype="float32")
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 0
    assert rein("train", file, "runtime=fsdp", f"nproc={ranks}", f"out={tmp_path}/more") == 0
    assert far(losses(tmp_path / "one"), losses(tmp_path / "more")) < 1e-4


@pytest.mark.slow
def test_fast_on_ranks_is_near_exact(whole: Path, data: Path, tmp_path: Path) -> None:
    body = train_recipe(whole, data, tmp_path / "one", dtype="float32")
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 0
    assert rein("train", file, *WORDS, "model.precision=fast", f"out={tmp_path}/fast") == 0
    for role in ("actor", "critic"):
        one, fast = (norms(tmp_path / name, f"{role}/grad_norm") for name in ("one", "fast"))
        assert fast == pytest.approx(one, rel=0.1)


def norms(out: Path, name: str) -> list[float]:
    found = [line[name] for line in metrics(out) if name in line]
    assert found
    return found


def test_what_two_ranks_saved_one_and_three_go_on_from(whole: Path, data: Path, tmp_path: Path) -> None:
    body = train_recipe(whole, data, tmp_path / "whole") | {"guards": {"preset": "off"}}
    body["data"] |= {"train_batch_size": 48}
    body["trainer"] |= {"save_freq": 1}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file, *WORDS) == 0
    snapshots = tmp_path / "whole" / "train" / "snapshots"
    first = min(snapshots.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    assert {path.name for path in first.iterdir()} == {
        "state.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
    }
    done = int(first.name.partition("-")[2])
    unbroken = [line for line in metrics(tmp_path / "whole") if line["number"] > done]
    for ranks in (1, 3):
        out = tmp_path / f"on{ranks}"
        words = ("runtime=fsdp", f"nproc={ranks}", f"out={out}", f"resume={first}")
        assert rein("train", file, *words) == 0
        later = [line for line in metrics(out) if line["number"] > done]
        assert far(unbroken, later) < 1e-9


@pytest.mark.slow
def test_sft_and_a_reward_model_on_two_ranks(tiny: Path, data: Path, tmp_path: Path) -> None:
    body = recipe(tiny, data, tmp_path / "one") | {"stages": ["sft", "reward"]}
    body["model"] |= {"dtype": "float64"}
    body["sft"] |= {"ppo_max_token_len_per_gpu": 128, "save_freq": 2}
    body["reward"] = {"files": str(data / "pairs.parquet"), "batch_size": 16, "save_freq": 2}
    body["reward"] |= {"ppo_max_token_len_per_gpu": 256}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    assert rein("run", file, *WORDS, f"out={tmp_path}/two") == 0
    for stage in ("sft", "reward"):
        assert far(metrics(tmp_path / "one", stage), metrics(tmp_path / "two", stage)) < 1e-9
        assert weights_apart(tmp_path / "one" / stage / "model", tmp_path / "two" / stage / "model") < 1e-9


def test_ranks_with_nothing_to_do(whole: Path, data: Path, tmp_path: Path) -> None:
    """Mini-batches of one row, and of few micro-batches, on two ranks (faults: B36)."""
    body = train_recipe(whole, data, tmp_path / "one")
    body["data"] |= {"train_batch_size": 6}
    body["actor"] |= {"ppo_mini_batch_size": 1, "ppo_epochs": 1, "ppo_max_token_len_per_gpu": 24}
    body["trainer"] |= {"total_training_steps": 1}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 0
    began = time.monotonic()
    assert rein("train", file, *WORDS, f"out={tmp_path}/two") == 0
    assert time.monotonic() - began < 60
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "two")) < 1e-9


@pytest.mark.slow
def test_a_spike_is_undone_and_softened_alike(whole: Path, data: Path, tmp_path: Path) -> None:
    body = train_recipe(whole, data, tmp_path / "one")
    body["data"] |= {"train_batch_size": 48}
    body["actor"] |= {"ppo_mini_batch_size": 8, "optim": {"lr": "3e-2"}}
    high = {"name": "kl_high", "metric": "probe/kl_reference", "above": 0.05, "for": 1, "rest": 0}
    high |= {"then": ["rollback", {"lr": 0.1}, {"kl_coef": 1.5}]}
    body["guards"] = {"preset": "off", "max_rollbacks": 9, "snapshot_every": 8, "rules": [high]}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 0
    assert rein("train", file, *WORDS, f"out={tmp_path}/two") == 0
    one, two = (
        [
            {name: event[name] for name in ("kind", "number", "changed", "from", "to") if name in event}
            for event in read(tmp_path / name / "train" / "journal.jsonl")
        ]
        for name in ("one", "two")
    )
    assert one == two
    assert [event["kind"] for event in one].count("rollback") >= 1
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "two")) < 1e-6  # the spike magnifies rounding


def amid(file: str, out: Path) -> "subprocess.Popen[str]":
    """`rein train` on two ranks, four updates done."""
    process = rein_apart("train", file, *WORDS)
    while process.poll() is None and not any(line["number"] >= 4 for line in metrics(out)):
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("victim", ["follower", pytest.param("leader", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_run_which_goes_on_from_its_snapshot(
    whole: Path, data: Path, tmp_path: Path, victim: str
) -> None:
    body = train_recipe(whole, data, tmp_path / "run")
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 3}
    body["guards"] = {"snapshot_every": 1}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    process = amid(file, tmp_path / "run")
    others = ranks_of(process.pid)
    assert len(others) == 1
    os.kill(others[0] if victim == "follower" else process.pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert gone([process.pid, *others])
    if victim == "follower":
        assert process.returncode == 7, said
        assert (
            "rank 1 (SIGKILL) ended amid the run; the same command goes on from the newest snapshot" in said
        )
        assert said.count("\n") == 1
    assert rein("train", file) == 0
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    apart = weights_apart(tmp_path / "run" / "train" / "last", tmp_path / "unbroken" / "train" / "last")
    assert apart < 1e-9


def test_a_lost_rank_is_replaced_as_often_as_the_recipe_allows(
    whole: Path, data: Path, tmp_path: Path
) -> None:
    body = train_recipe(whole, data, tmp_path / "run") | {"restarts": 1}
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 3}
    body["guards"] = {"snapshot_every": 1}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    process = amid(file, tmp_path / "run")
    (other,) = ranks_of(process.pid)
    os.kill(other, signal.SIGKILL)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "rank 1 (SIGKILL) ended amid the run" in out
    assert "beginning again, at most 0 more times" in out
    assert "resume: from update" in out
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    apart = weights_apart(tmp_path / "run" / "train" / "last", tmp_path / "unbroken" / "train" / "last")
    assert apart < 1e-9


@pytest.mark.slow
def test_a_signal_saves_and_leaves_no_process(whole: Path, data: Path, tmp_path: Path) -> None:
    body = train_recipe(whole, data, tmp_path / "run")
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 3}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    process = rein_apart("train", file, *WORDS)
    while process.poll() is None and not metrics(tmp_path / "run"):
        time.sleep(0.02)
    others = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert "state saved" in said
    assert gone([process.pid, *others])


@pytest.mark.slow
def test_torchrun_starts_the_ranks(whole: Path, data: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "one"))
    assert rein("train", file) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "rein", "run", file, "runtime=fsdp", "nproc=2", f"out={tmp_path}/two"]
    done = subprocess.run(
        [*torchrun, *words], cwd=ROOT, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "two")) < 1e-9
