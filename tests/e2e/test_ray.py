"""A driver leads crews of Ray workers through the loop of one process: the same numbers, whatever ends."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_run import drafts, metrics, recipe, rein, rein_apart, write_recipe
from many_run import apart_by_role, ended, family, far, gone, losses, train_recipe, weights_apart

from rein.journal import read

pytestmark = pytest.mark.long

WORDS = ("runtime=ray", "nproc=2", "ray.cpus_per_worker=0.5")
THREE = ("runtime=ray", "nproc=3", "ray.cpus_per_worker=0.3")
APART = ("runtime=ray", "ray.cpus_per_worker=0.25", "critic.placement=separate")


def on_ray(verb: str, file: str, *words: str, code: int = 0) -> tuple[str, str]:
    """What a command of its own process says; it must leave no other."""
    return ended(rein_apart(verb, file, *words), code)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param({}, WORDS, id="two"),
        pytest.param({}, THREE, id="three", marks=pytest.mark.slow),
        pytest.param({"lora_rank": 4}, WORDS, id="lora", marks=pytest.mark.slow),
        pytest.param(
            {}, (*WORDS, "fsdp.ulysses_sequence_parallel_size=2"), id="ulysses", marks=pytest.mark.slow
        ),
    ],
)
def test_workers_train_as_one_process(
    whole: Path, data: Path, tmp_path: Path, model: dict[str, Any], words: tuple[str, ...]
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "one", **model))
    assert rein("train", file) == 0
    on_ray("train", file, *words, f"out={tmp_path}/ray")
    assert far(metrics(tmp_path / "one"), metrics(tmp_path / "ray")) < 1e-9
    for folder in ("last", "critic"):
        assert weights_apart(tmp_path / "one" / "train" / folder, tmp_path / "ray" / "train" / folder) < 1e-9
    assert drafts(tmp_path / "ray") == []


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_actor_and_critic_apart(whole: Path, data: Path, tmp_path: Path, nproc: int) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "one"))
    assert rein("train", file) == 0
    on_ray("train", file, *APART, f"nproc={nproc}", f"out={tmp_path}/ray")
    assert apart_by_role(tmp_path / "one", tmp_path / "ray") < 1e-9
    for folder in ("last", "critic"):
        assert weights_apart(tmp_path / "one" / "train" / folder, tmp_path / "ray" / "train" / folder) < 1e-9


@pytest.mark.slow
def test_in_float32_too(whole: Path, data: Path, tmp_path: Path) -> None:
    body = train_recipe(whole, data, tmp_path / "one", dtype="float32")
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("train", file) == 0
    on_ray("train", file, *WORDS, f"out={tmp_path}/ray")
    assert far(losses(tmp_path / "one"), losses(tmp_path / "ray")) < 1e-4


@pytest.mark.slow
def test_sft_and_a_reward_model(tiny: Path, data: Path, tmp_path: Path) -> None:
    body = recipe(tiny, data, tmp_path / "one") | {"stages": ["sft", "reward"]}
    body["model"] |= {"dtype": "float64"}
    body["sft"] |= {"ppo_max_token_len_per_gpu": 128, "save_freq": 2}
    body["reward"] = {"files": str(data / "pairs.parquet"), "batch_size": 16, "save_freq": 2}
    body["reward"] |= {"ppo_max_token_len_per_gpu": 256}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    on_ray("run", file, *WORDS, f"out={tmp_path}/ray")
    for stage in ("sft", "reward"):
        assert far(metrics(tmp_path / "one", stage), metrics(tmp_path / "ray", stage)) < 1e-9
        assert weights_apart(tmp_path / "one" / stage / "model", tmp_path / "ray" / stage / "model") < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("words", [WORDS, APART], ids=["colocated", "apart"])
def test_what_workers_saved_one_process_goes_on_from(
    whole: Path, data: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    body = train_recipe(whole, data, tmp_path / "ray") | {"guards": {"preset": "off"}}
    body["data"] |= {"train_batch_size": 48}
    body["trainer"] |= {"save_freq": 1}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    on_ray("train", file, *words)
    snapshots = tmp_path / "ray" / "train" / "snapshots"
    first = min(snapshots.iterdir(), key=lambda path: int(path.name.partition("-")[2]))
    done = int(first.name.partition("-")[2])
    unbroken = [line for line in metrics(tmp_path / "ray") if line["number"] > done]
    same = [word for word in words if word.startswith("critic.")]
    on_ray("train", file, *APART[:2], *same, f"out={tmp_path}/again", f"resume={first}")
    later = [line for line in metrics(tmp_path / "again") if line["number"] > done]
    assert far(unbroken, later) < 1e-9
    if not same:
        assert rein("train", file, f"out={tmp_path}/single", f"resume={first}") == 0
        later = [line for line in metrics(tmp_path / "single") if line["number"] > done]
        assert far(unbroken, later) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("words", [WORDS, APART], ids=["colocated", "apart"])
def test_a_spike_is_undone_and_softened_alike(
    whole: Path, data: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    body = train_recipe(whole, data, tmp_path / "one")
    body["data"] |= {"train_batch_size": 48}
    body["actor"] |= {"ppo_mini_batch_size": 8, "optim": {"lr": "3e-2"}}
    high = {"name": "kl_high", "metric": "probe/kl_reference", "above": 0.05, "for": 1, "rest": 0}
    high |= {"then": ["rollback", {"lr": 0.1}, {"kl_coef": 1.5}]}
    body["guards"] = {"preset": "off", "max_rollbacks": 9, "snapshot_every": 8, "rules": [high]}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    on_ray("train", file, *words, f"out={tmp_path}/ray")
    events = read(tmp_path / "ray" / "train" / "journal.jsonl")
    assert [event["kind"] for event in events].count("rollback") >= 1
    if words is WORDS:
        assert rein("train", file) == 0
        one = read(tmp_path / "one" / "train" / "journal.jsonl")
        kept = ("kind", "number", "changed", "from", "to")
        assert [[e.get(name) for name in kept] for e in one] == [
            [e.get(name) for name in kept] for e in events
        ]
        assert far(metrics(tmp_path / "one"), metrics(tmp_path / "ray")) < 1e-6
    else:
        probed = [
            line["probe/kl_reference"] for line in metrics(tmp_path / "ray") if "probe/kl_reference" in line
        ]
        assert max(probed) > 0.05
        assert probed[-1] < 0.05


def test_more_than_there_is_fails_in_seconds(whole: Path, data: Path, tmp_path: Path) -> None:
    """Two GPUs on a machine without one (faults: B37)."""
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "run"))
    began = time.monotonic()
    words = ("runtime=ray", "nproc=2", "ray.gpus_per_worker=1", "ray.cpus_per_worker=0.5")
    _, said = on_ray("train", file, *words, code=2)
    assert time.monotonic() - began < 60
    assert "1 x (1 CPU, 2 GPU) asked for, the cluster has" in said
    assert "0 GPU on 1 machine(s); lower nproc" in said
    assert said.count("\n") == 1
    assert drafts(tmp_path) == []


def test_an_address_where_nothing_listens_fails_in_seconds(whole: Path, data: Path, tmp_path: Path) -> None:
    """Ray itself calls there for ever."""
    file = write_recipe(tmp_path / "recipe.yaml", train_recipe(whole, data, tmp_path / "run"))
    with socket.socket() as closed:  # bound, so that nobody else listens there
        closed.bind(("", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        began = time.monotonic()
        _, said = on_ray("train", file, *WORDS, f"ray.address={address}", code=2)
    assert time.monotonic() - began < 60
    assert f"ray.address: {address} gives no cluster (" in said
    assert said.count("\n") == 1
    assert drafts(tmp_path) == []


def workers_of(root: int) -> list[psutil.Process]:
    """Workers of crews below a process."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if process.cmdline() and process.cmdline()[0].startswith("ray::Worker"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def until(process: "subprocess.Popen[str]", out: Path, number: int) -> None:
    """Until so many updates are done."""
    while process.poll() is None and not any(line["number"] >= number for line in metrics(out)):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[1]


def long_recipe(whole: Path, data: Path, out: Path) -> dict[str, Any]:
    body = train_recipe(whole, data, out)
    body["actor"] |= {"ppo_mini_batch_size": 8, "ppo_epochs": 3}
    body["guards"] = {"snapshot_every": 1}
    return body


def test_a_killed_worker_ends_the_run_or_is_replaced(whole: Path, data: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", long_recipe(whole, data, tmp_path / "run"))
    process = rein_apart("train", file, *WORDS, "restarts=1")
    until(process, tmp_path / "run", 4)
    known = family(process.pid)
    workers_of(process.pid)[1].kill()
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "ended amid the run" in out
    assert "beginning again, at most 0 more times" in out
    assert "resume: from update" in out
    assert gone(known)
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    apart = weights_apart(tmp_path / "run" / "train" / "last", tmp_path / "unbroken" / "train" / "last")
    assert apart < 1e-9


@pytest.mark.slow
def test_without_restarts_it_is_an_error_that_says_how_to_go_on(
    whole: Path, data: Path, tmp_path: Path
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", long_recipe(whole, data, tmp_path / "run"))
    process = rein_apart("train", file, *WORDS)
    until(process, tmp_path / "run", 4)
    known = family(process.pid)
    workers_of(process.pid)[0].kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 7, said
    assert "ended amid the run; the same command goes on from the newest snapshot" in said
    assert gone(known)
    assert rein("train", file) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_leave_no_process(whole: Path, data: Path, tmp_path: Path, number: int) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", long_recipe(whole, data, tmp_path / "run"))
    process = rein_apart("train", file, *WORDS)
    until(process, tmp_path / "run", 4)
    known = family(process.pid)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert gone(known)
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number, said
        assert "state saved" in said
    assert rein("train", file) == 0
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    apart = weights_apart(tmp_path / "run" / "train" / "last", tmp_path / "unbroken" / "train" / "last")
    assert apart < 1e-9


@contextmanager
def two_nodes() -> Iterator[tuple[str, list[Any], Any]]:
    """A head without CPUs and two nodes of two, each with a raylet of its own; its address."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        yield cluster.address, nodes, cluster
    finally:
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ray's own start
def test_a_worker_and_then_a_whole_node_end(whole: Path, data: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", long_recipe(whole, data, tmp_path / "run"))
    with two_nodes() as (address, nodes, cluster):
        raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        words = ("runtime=ray", "nproc=1", "nnodes=2", f"ray.address={address}", "restarts=2")
        process = rein_apart("train", file, *words)
        until(process, tmp_path / "run", 4)
        assert [len(workers_of(raylet)) for raylet in raylets] == [1, 1]  # one on each node
        workers_of(raylets[1])[0].kill()
        until(process, tmp_path / "run", 12)
        cluster.remove_node(nodes[1], allow_graceful=False)
        out, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        assert out.count("beginning again") == 2
        assert out.count("resume: from update") == 2
    assert rein("train", file, f"out={tmp_path}/unbroken") == 0
    apart = weights_apart(tmp_path / "run" / "train" / "last", tmp_path / "unbroken" / "train" / "last")
    assert apart < 1e-9
