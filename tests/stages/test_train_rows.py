"""Training says what its rows cannot serve, notices what is odd about them, and knows its own snapshots."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows_made import random_trajectories

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import DataError
from rein.models.tiny import make_tiny
from rein.stages import train
from rein.tracking.console import Console
from rein.types import Trajectory

N = 12
PAIRED = [
    dataclasses.replace(row, group=f"prompt {i // 2}", score=float(i % 2))
    for i, row in enumerate(random_trajectories(N))
]


def of(rows: list[Trajectory], model: str, folder: Path, *words: str) -> Recipe:
    write_rows(folder / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES, {})
    base = [
        f"model.path={model}",
        f"data.train_files={folder}/rows.parquet",
        f"out={folder}/run",
        "threads=1",
    ]
    sizes = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1"]
    steps = ["data.holdout_fraction=0", "trainer.critic_warmup=0", "data.max_response_length=9"]
    return load(None, [*base, *sizes, *steps, "actor.optim.lr=1e-3", *words])[0]


def bare(rows: list[Trajectory], **changes: Any) -> list[Trajectory]:
    return [dataclasses.replace(row, **changes) for row in rows]


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (bare(PAIRED, behavior_log_probs=None), "algorithm.method=topr", "12 of 12 rows have none"),
        (
            bare(PAIRED, behavior_log_probs=None),
            "algorithm.method=topr",
            "ppo|grpo|awr|sppo|dpo|bc|filtered_bc",
        ),
        (PAIRED, "algorithm.method=topr data.behavior=unknown", "data.behavior is unknown"),
        (random_trajectories(N), "algorithm.method=grpo", "two or more scored responses to a prompt"),
        (bare(PAIRED, score=1.0), "algorithm.method=dpo", "two responses to a prompt that score differently"),
        (PAIRED, "algorithm.adv_estimator=remax", "baseline_score in every row"),
    ],
)
def test_what_rows_cannot_serve_is_refused_with_what_they_can(
    rows: list[Trajectory], words: str, said: str, tiny_lm: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        train.run(of(rows, tiny_lm, tmp_path, *words.split()), Console(quiet=True))
    assert said in str(error.value)


def test_rows_without_scores_can_be_imitated_and_nothing_else(tiny_lm: str, tmp_path: Path) -> None:
    rows = bare(PAIRED, score=None)
    assert train.run(of(rows, tiny_lm, tmp_path, "algorithm.method=bc"), Console(quiet=True))["updates"] == 3
    with pytest.raises(DataError):
        train.run(of(rows, tiny_lm, tmp_path, "algorithm.method=awr"), Console(quiet=True))


def test_equal_scores_and_strange_log_probs_are_said(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bare(PAIRED, score=0.0)
    rows = [
        dataclasses.replace(row, behavior_log_probs=np.full_like(row.behavior_log_probs, -30)) for row in rows
    ]
    train.run(of(rows, tiny_lm, tmp_path), Console())
    said = capsys.readouterr().out
    assert "all 12 rows to train on score 0" in said
    assert "times their stored probability" in said
    assert "KL: KL loss 0.05 (default)" in said


@pytest.mark.parametrize("method", ["ppo", "grpo", "dpo"])
def test_a_finished_run_is_not_taken_for_one_from_another_start(
    method: str, tiny_lm: str, tmp_path: Path
) -> None:
    """The path is the same, what lies there is not: the run is made anew."""
    model = tmp_path / "model"
    make_tiny(model, seed=0, hidden=32, layers=2)
    words = f"algorithm.method={method}"
    first = train.run(of(PAIRED, str(model), tmp_path, words), Console(quiet=True))
    again = train.run(of(PAIRED, str(model), tmp_path, words), Console(quiet=True))
    assert again["metrics"] == first["metrics"]
    before = (tmp_path / "run" / "train" / "last" / "model.safetensors").read_bytes()
    make_tiny(model, seed=1, hidden=32, layers=2)
    train.run(of(PAIRED, str(model), tmp_path, words), Console(quiet=True))
    assert (tmp_path / "run" / "train" / "last" / "model.safetensors").read_bytes() != before


def test_other_log_probs_are_other_rows(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(of(PAIRED, tiny_lm, tmp_path), Console(quiet=True))
    other = [dataclasses.replace(row, behavior_log_probs=row.behavior_log_probs * 2) for row in PAIRED]  # type: ignore[operator]
    train.run(of(other, tiny_lm, tmp_path), Console())
    assert "had other rows; starting anew" in capsys.readouterr().out
