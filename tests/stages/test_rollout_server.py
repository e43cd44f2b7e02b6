"""Rollout through a server: what its log-probs are, and what is kept of it when it, or this process, dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rows_made import row
from serving import Manner, Server, serving

from rein.config.recipe import Recipe
from rein.engines import http_json
from rein.errors import EngineError
from rein.models.actor import Actor, load_actor
from rein.stages import rollout
from rein.tracking.console import Console

pytestmark = pytest.mark.usefixtures("no_proxy")
QUESTIONS = [f"{a}+{b}=" for a in range(8) for b in range(5)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "FIRST_WAIT", 0.005)


@pytest.fixture(scope="module")
def policy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """Saved with larger weights: distributions are not flat, and answers end at different lengths."""
    made = load_actor(str(tiny))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
    made.path = str(tmp_path_factory.mktemp("policies") / "large")
    made.save(Path(made.path))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": QUESTIONS}), path)
    return path


def recipe(policy: Actor, file: Path, url: str | None, **rollout: Any) -> Recipe:
    given = {"temperature": 0.6, "n": 2, "max_new_tokens": 12, "batch_size": 16, "engine": "server"} | rollout
    server = {"url": url, "concurrency": 4, "timeout": 20.0, "retries": 2}
    return Recipe.model_validate(
        {
            "out": str(file.parent / "out"),
            "threads": 1,
            "model": {"path": policy.path},
            "rollout": {"files": str(file), "server": server, **given},
        }
    )


def written(of: Recipe) -> pa.Table:
    return pq.read_table(Path(of.out) / "rollout" / "trajectories.parquet")


def notes(table: pa.Table) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in table.schema.metadata.items()}


def own(policy: Actor, table: pa.Table, temperature: float) -> list[np.ndarray]:
    rows = [row(r["prompt_ids"], r["response_ids"]) for r in table.to_pylist()]
    with torch.no_grad():
        found, _ = policy.log_probs(rows, torch.full((len(rows),), temperature))
    return [found[i, : len(one.response_ids)].numpy() for i, one in enumerate(rows)]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("kind", ["processed", "raw", "cut"])
def test_what_is_stored_is_at_the_sampling_temperature_whatever_the_server_states(
    policy: Actor, file: Path, kind: str, top_p: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(policy, Manner(kind=kind)) as server:
        made = recipe(policy, file, server.url, top_p=top_p)
        facts = rollout.run(made, Console())
    found = "processed" if kind == "cut" and top_p == 1 else kind
    table = written(made)
    for stored, mine in zip(table["behavior_log_probs"].to_pylist(), own(policy, table, 0.6), strict=True):
        np.testing.assert_allclose(stored, mine, atol=1e-4)
    said = notes(table)
    assert facts["log_probs_kind"] == said["rein.log_probs_kind"] == found
    assert said["rein.log_probs_stored"] == ("as given" if found == "processed" else "recomputed")
    assert float(said["rein.log_prob_diff_max"]) < 1e-4
    warned = "the actor's own are stored" in capsys.readouterr().out
    assert warned == (found != "processed")


def test_log_probs_of_other_weights_are_left_out(
    policy: Actor, other_tiny: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(load_actor(str(other_tiny))) as server:
        made = recipe(policy, file, server.url)
        rollout.run(made, Console())
    table = written(made)
    assert table.num_rows == 2 * len(QUESTIONS)
    assert not {"behavior_log_probs", "behavior_policy"} & set(table.column_names)
    said = notes(table)
    assert (said["rein.log_probs_kind"], said["rein.log_probs_stored"]) == ("unknown", "left out")
    assert "rein.behavior_policy" not in said
    assert f"are not those of {policy.path}" in capsys.readouterr().out


def asked(server: Server) -> list[tuple[Any, ...]]:
    return [(*body["prompt"], body["seed"]) for body in server.bodies]


def test_the_same_command_after_the_server_died_does_what_is_missing(policy: Actor, file: Path) -> None:
    """And its rows are those of a run that nothing befell."""
    with serving(policy) as server:
        whole = recipe(policy, file, server.url)
        rollout.run(whole, Console(quiet=True))
        expected, every = written(whole), asked(server)
        Path(whole.out, "rollout", "trajectories.parquet").unlink()
        server.manner.dies_after = server.answered + 40
        with pytest.raises(
            EngineError, match=r"tried 3 times; .*; 32 rows are kept and the same command goes on"
        ):
            rollout.run(whole, Console(quiet=True))
        assert len(list(Path(whole.out, "rollout", "shards").iterdir())) == 2
        server.manner.dies_after = None
        server.bodies.clear()
        later = recipe(policy, file, server.url)
        later = later.model_copy(
            update={"rollout": later.rollout.model_copy(update={"server": later.rollout.server.model_copy(
                update={"concurrency": 2, "retries": 5, "timeout": 9.0})})}
        )  # fmt: skip
        facts = rollout.run(later, Console(quiet=True))
        assert facts["shards"] == {"found": 2, "computed": 3}
        assert set(asked(server)) == set(every[32:])  # a request of before may still come in
    assert written(whole).drop_columns("behavior_log_probs") == expected.drop_columns("behavior_log_probs")
    assert not Path(whole.out, "rollout", "shards").exists()


def test_a_server_that_is_away_for_a_while_is_waited_for(policy: Actor, file: Path) -> None:
    with serving(policy) as server:
        made = recipe(policy, file, server.url)
        made.rollout.server.__dict__["retries"] = 8
        server.manner.refuse = dict.fromkeys(range(20, 40), (503, "restarting"))
        rollout.run(made, Console(quiet=True))
    table = written(made)
    pairs = [tuple(ids) for ids in table["prompt_ids"].to_pylist()]
    assert len(pairs) == 2 * len(QUESTIONS)
    assert len(set(pairs)) == len(QUESTIONS)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_loses_no_row_and_doubles_none(policy: Actor, file: Path, number: int) -> None:
    with serving(policy, Manner(every=0.02)) as server:
        made = recipe(policy, file, server.url)
        place = file.parent / "recipe.yaml"
        place.write_text(json.dumps({**made.model_dump(mode="json"), "stages": ["rollout"]}))
        command = [sys.executable, "-m", "rein", "rollout", str(place)]
        env = os.environ | {"no_proxy": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        shards = Path(made.out, "rollout", "shards")
        while first.poll() is None and not (shards.exists() and len(list(shards.glob("*.parquet"))) >= 2):
            time.sleep(0.01)
        first.send_signal(number)
        first.communicate()
        assert first.returncode in (-9, 143)
        kept = len(list(shards.glob("*.parquet")))
        assert 2 <= kept < 5
        server.bodies.clear()
        subprocess.run(command, env=env, check=True, capture_output=True)
        assert len(set(asked(server))) == len(asked(server)) == 2 * len(QUESTIONS) - 16 * kept
    table = written(made)
    assert table.num_rows == 2 * len(QUESTIONS)
    assert table["prompt_ids"].to_pylist()[::2] == table["prompt_ids"].to_pylist()[1::2]
    assert len({tuple(ids) for ids in table["prompt_ids"].to_pylist()}) == len(QUESTIONS)
