"""Memory that really runs out: the token budget is halved, the same rows are done again, numbers stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import events, guarded, logged, ran, weights
from rows_made import random_trajectories
from torch import nn

from rein import cli
from rein.config.recipe import Recipe
from rein.errors import OutOfMemory
from rein.models.load import trunk_of
from rein.models.tiny import make_tiny
from rein.runtime.interrupt import Interrupt
from rein.stages import train
from rein.stages.train_open import open_job
from rein.tracking.console import Console

TOKENS = 4096  # budget: all rows in one micro-batch
WITHOUT_END = 2**50  # bytes that no machine gives


class Little:
    """A model's trunk as on a machine with little memory: too many tokens, and torch's allocator refuses.

    A limit of the system's would do so too, but where oneDNN meets it first depends on the CPU.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def __call__(self, trunk: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        if options["input_ids"].numel() > self.most:
            torch.empty(WITHOUT_END, dtype=torch.uint8)


def limited(some: Recipe, most: int) -> tuple[int, str]:
    """A run whose models take so many tokens at a time: its exit code and what it says."""
    job = open_job(some, Console(quiet=True))
    for model in job.team.models.values():
        trunk_of(model.model).register_forward_pre_hook(Little(most), with_kwargs=True)
    try:
        train.train(job, Interrupt(), lambda steps=1, note="", total=None: None)
        job.finish()
        return 0, ""
    except OutOfMemory as error:
        return cli.exit_code(error)[0], str(error)
    finally:
        job.close()


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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two runs with little memory: one that fits in smaller pieces, one that never does."""
    folder = tmp_path_factory.mktemp("memory")
    made: dict[str, Any] = {"folder": folder, "ends": []}
    for name, count, most in (("halved", 64, 600), ("never", 16, 10)):
        model = make_tiny(folder / f"model-{name}", seed=0, hidden=128, layers=2)
        made[name] = long_rows(model, folder, name, count, TOKENS)
        made["ends"].append(limited(made[name], most))
    return made


def test_the_budget_is_halved_until_the_batch_fits_and_the_journal_says_so(found: dict[str, Any]) -> None:
    assert found["ends"][0] == (0, "")
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
