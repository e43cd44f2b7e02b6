"""A pool of Ray workers scores, answers and audits as one process does, and what it has done stays done."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from e2e_run import ROOT, drafts, manifest, recipe, rein, rein_apart, write_recipe
from many_run import ended, family, gone

from rein.models.reward_model import load_reward_model

pytestmark = pytest.mark.long

KEYS = {"runtime": "ray", "nproc": "2", "ray.cpus_per_worker": "0.5", "ray.shard_rows": "16"}
HERE = str(Path(__file__).parent)
Body = dict[str, Any]


@pytest.fixture(scope="session")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    made = load_reward_model(str(tiny), seed=1)
    made.model.score.weight.data.normal_(std=0.1)
    made.save(folder)
    return folder


def apart(verb: str, file: str, *words: str) -> "subprocess.Popen[str]":
    """A command over two workers, unless `words` say otherwise."""
    keys = KEYS | dict(word.split("=", 1) for word in words if "=" in word)
    given = [word for word in words if "=" not in word] + [f"{key}={value}" for key, value in keys.items()]
    return rein_apart(verb, file, *given, PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}:{HERE}")


def on_ray(verb: str, file: str, *words: str, code: int = 0) -> tuple[str, str]:
    """What a command of its own process says; it must leave no other."""
    return ended(apart(verb, file, *words), code)


def rows(out: Path, stage: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / stage / "trajectories.parquet").to_pylist()
    return found


def same_answers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """To the last token and score; log-probs but for what a batch's size rounds."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        mine, theirs = a.pop("behavior_log_probs"), b.pop("behavior_log_probs")
        assert mine == pytest.approx(theirs, abs=2e-6)
        assert a == b


def shards(out: Path, stage: str) -> dict[str, int]:
    found: dict[str, int] = manifest(out, stage)["facts"]["shards"]
    return found


def score_recipe(tiny: Path, data: Path, out: Path, **options: Any) -> Body:
    """192 rows for the user's function: 12 shards of 16."""
    body = recipe(tiny, data, out) | {"stages": ["score"]}
    reward = {"name": "slowly:length", "options": {"log": str(out.parent / "log"), **options}}
    body["score"] = {"files": str(data / "pairs.parquet"), "reward": reward}
    return body


def calls(folder: Path) -> list[str]:
    return (folder / "log").read_text().split()


def in_one_process(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.syspath_prepend(HERE)
    assert rein(*words) == 0


def until(process: "subprocess.Popen[str]", folder: Path, number: int) -> list[Path]:
    """The shards kept, once there are so many."""
    while process.poll() is None and len(found := list(folder.glob("*.parquet"))) < number:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[1]
    return found


def kill(process: "subprocess.Popen[str]") -> None:
    """As a machine's failure would; Ray's two agents see it after a minute, everything else at once."""
    known = psutil.Process(process.pid).children(recursive=True)
    others = [child.pid for child in known if "Agent" not in child.name()]
    process.kill()
    process.communicate(timeout=20)
    assert gone(others)


def workers_of(root: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if process.cmdline() and "MapWorker" in process.cmdline()[0]:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_answers_and_scores_are_those_of_one_process(
    tiny: Path, data: Path, reward_model: Path, tmp_path: Path
) -> None:
    body = recipe(tiny, data, tmp_path / "one") | {"stages": ["rollout", "score"]}
    rule = {"name": "format", "options": {"pattern": "[0-4]{2}", "match": "search"}}
    noisy = {"name": "noisy", "weight": 0.5, "options": {"of": "model", "right": 0.05}}
    body |= {"score": {"reward": [rule, "model", noisy], "path": str(reward_model)}}
    body |= {"cache": str(tmp_path / "one-cache")}
    body["rollout"] |= {"n": 6}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    two = tmp_path / "two"
    words = (f"out={two}", f"cache={tmp_path}/cache", "ray.shard_rows=96")
    said, err = on_ray("run", file, *words)
    assert err == ""
    assert "Ray" not in said
    same_answers(rows(tmp_path / "one", "rollout"), rows(two, "rollout"))
    same_answers(rows(tmp_path / "one", "score"), rows(two, "score"))
    assert shards(two, "rollout") == {"found": 0, "computed": 6}
    facts = [manifest(tmp_path / name, "score")["facts"] for name in ("one", "two")]
    assert facts[1].pop("shards") == {"found": 0, "computed": 3 + 6}
    assert facts[0] == facts[1]
    assert facts[0]["cache"]["misses"] > 100
    assert drafts(two) == []
    assert not list(two.glob("*/shards"))
    # What is in the cache is not computed again: the rules alone need workers.
    on_ray("score", file, *words, "nproc=1")
    again = manifest(two, "score")["facts"]
    assert again["shards"] == {"found": 0, "computed": 6}
    assert again["cache"]["misses"] == 0
    same_answers(rows(tmp_path / "one", "score"), rows(two, "score"))


def test_a_killed_run_computes_what_is_missing(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = score_recipe(tiny, data, tmp_path / "run", seconds=0.03)
    file = write_recipe(tmp_path / "recipe.yaml", body)
    process = apart("score", file)
    folder = tmp_path / "run" / "score" / "shards"
    until(process, folder, 3)
    kill(process)
    found = sorted(folder.glob("*.parquet"))
    assert 3 <= len(found) < 12
    with found[0].open("r+b") as harmed:
        harmed.truncate(200)
    found[1].write_bytes(b"no table")
    before = len(calls(tmp_path))
    said, _ = on_ray("score", file)
    assert f"score: {len(found) - 2} of 12 shards done before" in said
    assert shards(tmp_path / "run", "score") == {"found": len(found) - 2, "computed": 14 - len(found)}
    assert len(calls(tmp_path)) - before == 16 * (14 - len(found))
    assert not folder.exists()
    in_one_process(monkeypatch, "score", file, f"out={tmp_path}/one")
    assert rows(tmp_path / "run", "score") == rows(tmp_path / "one", "score")


def test_more_workers_than_there_is_room_for_fail_in_seconds(tiny: Path, data: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", score_recipe(tiny, data, tmp_path / "run"))
    began = time.monotonic()
    _, said = on_ray("score", file, "nproc=3", "ray.cpus_per_worker=1000", code=2)
    assert time.monotonic() - began < 60
    assert "runtime: ray: 3 x (1000 CPU, 0 GPU)" in said
    assert "asked for, the cluster has" in said
    assert said.count("\n") == 1
    assert drafts(tmp_path) == []


@pytest.mark.slow
def test_a_killed_worker_is_replaced(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", score_recipe(tiny, data, tmp_path / "run", seconds=0.05))
    process = apart("score", file)
    until(process, tmp_path / "run" / "score" / "shards", 2)
    known = family(process.pid)
    workers_of(process.pid)[0].kill()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said == ""
    assert gone(known)
    assert shards(tmp_path / "run", "score") == {"found": 0, "computed": 12}
    assert len(set(calls(tmp_path))) == 3
    in_one_process(monkeypatch, "score", file, f"out={tmp_path}/one")
    assert rows(tmp_path / "run", "score") == rows(tmp_path / "one", "score")


@pytest.mark.slow
def test_workers_that_always_end_are_an_error(tiny: Path, data: Path, tmp_path: Path) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", score_recipe(tiny, data, tmp_path / "run", fail="exit"))
    _, said = on_ray("score", file, code=7)
    assert "the same command goes on from there" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_what_a_worker_raises_is_what_one_process_raises(
    tiny: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", score_recipe(tiny, data, tmp_path / "run", fail="raise"))
    monkeypatch.syspath_prepend(HERE)
    assert rein("score", file) == 8
    alone = capsys.readouterr().err
    _, said = on_ray("score", file, "ray.shard_rows=500", code=8)
    assert said == alone
    assert "raised ValueError (no such length)" in said
    _, said = on_ray("score", file, "--debug", code=8)
    assert "slowly.py" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_leave_no_process_and_what_is_done(
    tiny: Path, data: Path, tmp_path: Path, number: int
) -> None:
    file = write_recipe(tmp_path / "recipe.yaml", score_recipe(tiny, data, tmp_path / "run", seconds=0.05))
    process = apart("score", file)
    until(process, tmp_path / "run" / "score" / "shards", 3)
    known = family(process.pid)
    os.kill(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert said.count("\n") == 1
    assert "the same command goes on from there" in said
    assert gone(known)
    kept = len(list((tmp_path / "run" / "score" / "shards").glob("*.parquet")))
    on_ray("score", file)
    assert shards(tmp_path / "run", "score") == {"found": kept, "computed": 12 - kept}


@pytest.mark.slow
def test_answers_of_a_killed_run_are_kept(tiny: Path, data: Path, tmp_path: Path) -> None:
    body = recipe(tiny, data, tmp_path / "one") | {"stages": ["rollout"]}
    body["rollout"] |= {"n": 8, "max_new_tokens": 40, "batch_size": 2}
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("rollout", file) == 0
    words = (f"out={tmp_path}/two",)
    process = apart("rollout", file, *words)
    folder = tmp_path / "two" / "rollout" / "shards"
    until(process, folder, 4)
    kill(process)
    kept = len(list(folder.glob("*.parquet")))
    on_ray("rollout", file, *words)
    assert shards(tmp_path / "two", "rollout") == {"found": kept, "computed": 48 - kept}
    same_answers(rows(tmp_path / "one", "rollout"), rows(tmp_path / "two", "rollout"))


@pytest.mark.slow
def test_an_audit_says_the_same(tiny: Path, data: Path, tmp_path: Path) -> None:
    body = recipe(tiny, data, tmp_path / "one") | {"stages": ["rollout", "score"]}
    body["score"]["reward"] = {"name": "format", "options": {"pattern": "[0-4]{2}", "match": "search"}}
    body["model"] |= {"dtype": "float64"}  # a fitted tail of rounding alone says nothing
    file = write_recipe(tmp_path / "recipe.yaml", body)
    assert rein("run", file) == 0
    stored = str(tmp_path / "one" / "score" / "trajectories.parquet")
    assert rein("audit", file, stored, f"out={tmp_path}/one") == 0
    on_ray("audit", file, stored, f"out={tmp_path}/two")
    one, two = (json.loads((tmp_path / name / "audit" / "audit.json").read_text()) for name in ("one", "two"))
    assert one["verdict"] == two["verdict"]
    assert far(one["model"], two["model"]) < 1e-6
    assert one["model"]["rows"] == 192
    assert not (tmp_path / "two" / "audit" / "shards").exists()


def far(one: Any, other: Any) -> float:
    """The largest difference of two trees of numbers, relative where they are large."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((far(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list):
        return max((far(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other) / max(1.0, abs(one))
    assert one == other
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_few_rows(
    tiny: Path, data: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = score_recipe(tiny, data, tmp_path / "run")
    table = pq.read_table(data / "prompts.parquet").slice(0, count)
    pq.write_table(table, tmp_path / "few.parquet")
    body |= {"stages": ["rollout", "score"]}
    body["rollout"] |= {"files": str(tmp_path / "few.parquet"), "n": 1}
    del body["score"]["files"]
    file = write_recipe(tmp_path / "recipe.yaml", body)
    on_ray("run", file, "ray.shard_rows=1")
    assert shards(tmp_path / "run", "rollout") == {"found": 0, "computed": count}
    in_one_process(monkeypatch, "run", file, f"out={tmp_path}/one")
    same_answers(rows(tmp_path / "run", "score"), rows(tmp_path / "one", "score"))


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
print(cluster.address, *[node.all_processes["raylet"][0].process.pid for node in nodes], flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@contextmanager
def two_nodes() -> Iterator[tuple[str, list[int]]]:
    """A head without CPUs and two nodes of two, in a process of their own: address and raylets."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": f"{ROOT}:{HERE}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as cluster:
        assert cluster.stdout is not None
        address, *raylets = cluster.stdout.readline().split()
        try:
            yield address, [int(raylet) for raylet in raylets]
        finally:
            known = family(cluster.pid)
            cluster.communicate("\n", timeout=60)
    assert gone(known, 90)


@pytest.mark.slow
def test_two_nodes_of_a_cluster_that_is_joined_and_one_ends(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = score_recipe(tiny, data, tmp_path / "run", seconds=0.05)
    file = write_recipe(tmp_path / "recipe.yaml", body)
    with two_nodes() as (address, raylets):
        words = ("nproc=1", "nnodes=2", "ray.cpus_per_worker=1", "restarts=1")
        process = apart("score", file, *words, f"ray.address={address}")
        until(process, tmp_path / "run" / "score" / "shards", 2)
        assert [len(workers_of(raylet)) for raylet in raylets] == [1, 1]
        os.kill(raylets[1], signal.SIGKILL)
        out, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        assert "or its machine" in out
        assert "going on, at most 0 more times after this" in out
        assert shards(tmp_path / "run", "score") == {"found": 0, "computed": 12}
    in_one_process(monkeypatch, "score", file, f"out={tmp_path}/one")
    assert rows(tmp_path / "run", "score") == rows(tmp_path / "one", "score")
