"""Training from a file of stored rows: nothing to hold out, scores normalised over the file."""

from pathlib import Path

import numpy as np
import pytest
from rows_made import random_trajectories
from training_made import recipe

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.stages import train
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics


@pytest.mark.parametrize("prompts", [1, 12], ids=["one prompt", "asked for none"])
def test_without_held_out_rows_training_goes_to_its_end(prompts: int, tiny_lm: str, tmp_path: Path) -> None:
    rows = random_trajectories(12)
    made = [
        trajectory_row(row) | {"prompt_ids": rows[i % prompts].prompt_ids.tolist()}
        for i, row in enumerate(rows)
    ]
    write_rows(tmp_path / "rows.parquet", made, TRAJECTORIES, {})
    some = recipe(
        data={
            "train_files": [str(tmp_path / "rows.parquet")],
            "holdout_fraction": 0.05 if prompts == 1 else 0,
        },
        model={"path": tiny_lm},
        trainer={"critic_warmup": 2},
    ).model_copy(update={"out": str(tmp_path / "run")})
    facts = train.run(some, Console())
    assert facts["rows"]["held_out"] == 0
    assert facts["rows"]["trained"] == 12
    assert facts["updates"] == 2 + 1 + 1  # fit, critic, actor
    assert (tmp_path / "run" / "train" / "best" / "model.safetensors").exists()
    lines = read_metrics(tmp_path / "run" / "train" / "metrics.jsonl")
    assert all(len(line) > 2 for line in lines)
    assert not any("probe/kl_reference" in line for line in lines)


def test_scores_are_normalised_once_over_the_rows_that_train(tiny_lm: str, tmp_path: Path) -> None:
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(12))]
    write_rows(tmp_path / "rows.parquet", rows, TRAJECTORIES, {})
    some = recipe(
        data={
            "train_files": [str(tmp_path / "rows.parquet")],
            "holdout_fraction": 0,
            "train_batch_size": 4,
        },
        actor={"ppo_mini_batch_size": 4},
        model={"path": tiny_lm},
        reward_manager={"normalize": "dataset"},
        trainer={"critic_warmup": 0},
    ).model_copy(update={"out": str(tmp_path / "run")})
    train.run(some, Console(quiet=True))
    lines = read_metrics(tmp_path / "run" / "train" / "metrics.jsonl")
    means = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert len(means) == 3
    assert sum(means) == pytest.approx(0, abs=1e-5)
    lowest = min(line["critic/score/min"] for line in lines if "critic/score/min" in line)
    assert lowest == pytest.approx((0 - 5.5) / np.arange(12).std(), rel=1e-5)
