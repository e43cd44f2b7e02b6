"""The journal of a run, beside its metrics; what comes too late is said and changes nothing."""

from pathlib import Path
from typing import Any

from rows_made import random_trajectories
from training_made import recipe

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.journal import read
from rein.stages import train
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics
from rein.types import Metrics


def run_of(model: str, folder: Path, *rules: dict[str, Any] | str) -> Path:
    """The folder of a fit update and two batches with one update of each role, under these rules alone."""
    rows = [trajectory_row(row) for row in random_trajectories(12)]
    write_rows(folder / "rows.parquet", rows, TRAJECTORIES, {})
    some = recipe(
        data={"train_files": [str(folder / "rows.parquet")], "train_batch_size": 4},
        actor={"ppo_mini_batch_size": 4},
        model={"path": model},
        trainer={"critic_warmup": 1},
        guards={"preset": "off", "rules": list(rules)},
    ).model_copy(update={"out": str(folder / "run")})
    train.run(some, Console(quiet=True))
    return folder / "run" / "train"


def test_an_event_bears_the_number_of_the_update_whose_metrics_it_judged(
    tiny_lm: str, tmp_path: Path
) -> None:
    """Before an update is applied and after: both are found on the curves where they are in the journal."""
    watched = ("actor/grad_norm", "critic/grad_norm", "probe/entropy")
    folder = run_of(tiny_lm, tmp_path, *({"metric": name, "above": -1, "rest": 0} for name in watched))
    logged = {
        (line["number"], name)
        for line in read_metrics(folder / "metrics.jsonl")
        for name in watched
        if name in line
    }
    assert {(line["number"], line["metric"]) for line in read(folder / "journal.jsonl")} == logged
    assert {name for _, name in logged} >= {"actor/grad_norm", "critic/grad_norm"}


def skip_after_the_fact(metrics: Metrics) -> str | None:
    return "skip" if "rollout_corr/raw_mean" in metrics or "probe/entropy" in metrics else None


def test_a_function_that_wants_to_skip_what_is_applied_is_heard_and_the_run_goes_on(
    tiny_lm: str, tmp_path: Path
) -> None:
    folder = run_of(tiny_lm, tmp_path, f"{__name__}:skip_after_the_fact")
    lines = read(folder / "journal.jsonl")
    assert len(lines) >= 3
    assert {line["action"] for line in lines} == {"alert"}
    assert max(line["number"] for line in read_metrics(folder / "metrics.jsonl")) == 1 + 2 * 2
