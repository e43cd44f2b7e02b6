"""Memory that really runs out: the token budget is halved, the same rows are done again, numbers stay."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import events, guarded, logged, ran, weights
from rows_made import random_trajectories

from rein.config.load import dump
from rein.config.recipe import Recipe
from rein.models.tiny import make_tiny

TOKENS = 4096  # budget: all rows in one micro-batch
LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from rein import cli
from rein.config.load import load
from rein.stages import train
from rein.stages.train_open import open_job
from rein.tracking.console import Console

def limited(path, room, fill):  # MiB that training may take; what was freed since the start is filled or not
    job = open_job(load(path)[0], Console(quiet=True))
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (now + (room << 20), resource.RLIM_INFINITY))
    ballast = []
    try:
        try:
            while fill:
                ballast.append(torch.empty(1 << 20, dtype=torch.uint8))
        except RuntimeError:
            del ballast[-room:]
        train.train(job, train.Interrupt(), lambda steps=1, note="": None)
        job.finish()
        return 0, ""
    except Exception as error:
        return cli.exit_code(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        job.close()

words = sys.argv[1:]
print(json.dumps([limited(words[0], 20, False), limited(words[1], 6, True)]))
"""


def long_rows(model: Path, folder: Path, out: str, count: int, budget: int) -> Recipe:
    """Rows of up to 120 tokens, one update of each role."""
    file = str(folder / f"{out}.parquet")
    return guarded(
        str(model), folder, out, rows=random_trajectories(count, longest=60),
        data={"train_files": [file], "train_batch_size": count, "holdout_fraction": 0,
              "max_response_length": 60},
        actor={"ppo_mini_batch_size": count, "ppo_epochs": 1, "ppo_max_token_len_per_gpu": budget},
        trainer={"total_epochs": 1},
    )  # fmt: skip


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not tell how much memory a process has"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two runs in a process with little memory: one that fits in smaller pieces, one that never does."""
    folder = tmp_path_factory.mktemp("memory")
    made: dict[str, Any] = {"folder": folder}
    words: list[str] = []
    for name, hidden, count in (("halved", 128, 64), ("never", 512, 16)):
        model = make_tiny(folder / f"model-{name}", seed=0, hidden=hidden, layers=2)
        made[name] = long_rows(model, folder, name, count, TOKENS)
        dump(made[name], folder / f"{name}.json")
        words.append(str(folder / f"{name}.json"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *words], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    made["ends"] = json.loads(done.stdout.splitlines()[-1])
    return made


def test_the_budget_is_halved_until_the_batch_fits_and_the_journal_says_so(found: dict[str, Any]) -> None:
    assert found["ends"][0] == [0, ""]
    lines = events(found["halved"])
    assert lines
    assert {line["kind"] for line in lines} == {"out_of_memory"}
    shares = [line["changed"]["token_budget"] for line in lines]
    assert shares == [[0.5**n, 0.5 ** (n + 1)] for n in range(len(lines))]
    assert all("can't allocate memory" in line["reason"] or "alloc" in line["reason"] for line in lines)
    assert {line["number"] for line in logged(found["halved"])} == {1, 2}


def test_what_comes_out_is_what_the_small_budget_gives(found: dict[str, Any]) -> None:
    share = events(found["halved"])[-1]["changed"]["token_budget"][1]
    halved: Recipe = found["halved"]
    small = long_rows(Path(str(halved.model.path)), found["folder"], "small", 64, int(TOKENS * share))
    ran(small)
    assert events(small) == []
    for which in ("last", "critic"):
        one, other = weights(halved, which), weights(small, which)
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-4, rtol=0)
    for mine, theirs in zip(logged(halved), logged(small), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_where_the_longest_row_alone_is_too_much_the_run_ends_with_exit_9(found: dict[str, Any]) -> None:
    rows = random_trajectories(16, longest=60)
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    code, said = found["ends"][1]
    assert code == 9
    assert said == (
        f"train: out of memory with {longest} tokens in a micro-batch, the longest row; shorten rows "
        "(data.max_response_length), use LoRA or gradient checkpointing"
    )
    shares = [line["changed"]["token_budget"][1] for line in events(found["never"])]
    assert TOKENS * shares[-1] <= longest < TOKENS * shares[-2]
