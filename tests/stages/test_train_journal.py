"""The journal of a run, beside its metrics."""

import json
from pathlib import Path

from rows_made import random_trajectories
from training_made import recipe

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.stages import train
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics


def test_an_event_bears_the_number_of_the_update_whose_metrics_it_judged(
    tiny_lm: str, tmp_path: Path
) -> None:
    """Before an update is applied and after: both are found on the curves where they are in the journal."""
    rows = [trajectory_row(row) for row in random_trajectories(12)]
    write_rows(tmp_path / "rows.parquet", rows, TRAJECTORIES, {})
    watched = ("actor/grad_norm", "critic/grad_norm", "probe/entropy")
    some = recipe(
        data={"train_files": [str(tmp_path / "rows.parquet")], "train_batch_size": 4},
        actor={"ppo_mini_batch_size": 4},
        model={"path": tiny_lm},
        trainer={"critic_warmup": 1},
        guards={"preset": "off", "rules": [{"metric": name, "above": -1, "rest": 0} for name in watched]},
    ).model_copy(update={"out": str(tmp_path / "run")})
    train.run(some, Console(quiet=True))
    folder = tmp_path / "run" / "train"
    lines = [json.loads(text) for text in (folder / "journal.jsonl").read_text().splitlines()]
    logged = {
        (line["number"], name)
        for line in read_metrics(folder / "metrics.jsonl")
        for name in watched
        if name in line
    }
    assert {(line["number"], line["metric"]) for line in lines} == logged
    assert {name for _, name in logged} >= {"actor/grad_norm", "critic/grad_norm"}
