"""The loop of SFT and reward modelling: saved as its kind, resumed bit for bit, never from broken ones."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rein.config.recipe import Optim, Recipe
from rein.errors import CheckpointError, GuardStop
from rein.protocols import Mesh
from rein.runtime.single import SINGLE
from rein.snapshots import Snapshots
from rein.stages.supervised import Pupil, descend, forget
from rein.stages.team import Team
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics
from rein.types import Metrics

TOTAL = 7


@dataclass
class Small:
    """What stands in a model's place."""

    model: nn.Linear


def run(
    folder: Path, *, what: str = "sft", stop_after: int = TOTAL, save_freq: int = 3, **more: Any
) -> nn.Linear:
    """Steps of a small regression; a loss that is not finite ends it after so many."""
    torch.manual_seed(0)
    model = Small(nn.Linear(4, 2))
    recipe = Recipe.model_validate({"trainer": {"logger": ["jsonl"]}} | more)

    def loss(model: Small, rows: Sequence[float], budget: int, mesh: Mesh) -> Metrics:
        (step,) = rows
        found = model.model(torch.ones(4) * (step + 1)).square().sum()
        found.backward()
        return {"train/loss": found.item() if step < stop_after else float("nan")}

    team = Team(recipe, SINGLE, {"actor": model})
    descend(
        team,
        Pupil(team, "actor", loss, Optim(lr=0.1), grad_clip=1.0, total=TOTAL, budget=1),
        lambda step: [step],
        recipe=recipe,
        console=Console(quiet=True),
        folder=folder,
        what=what,
        total=TOTAL,
        save_freq=save_freq,
        settings={"rows": "abc"},
    )
    return model.model


def stopped(folder: Path, after: int, what: str = "sft") -> None:
    with pytest.raises(GuardStop, match=f"step {after + 1} has loss nan"):
        run(folder, stop_after=after, what=what)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line | {"time": 0} for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("what", ["sft", "reward"])
def test_it_goes_on_from_its_last_snapshot_bit_for_bit(what: str, tmp_path: Path) -> None:
    stopped(tmp_path / "broken", 5, what)
    body = json.loads((tmp_path / "broken/snapshots/step-3/state.json").read_text())
    assert (body["kind"], body["number"]) == (what, 3)
    one, other = run(tmp_path / "broken", what=what), run(tmp_path / "unbroken", what=what)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert lines(tmp_path / "broken") == lines(tmp_path / "unbroken")


@pytest.mark.parametrize("harm", ["empty", "torn", "gone"])
def test_a_broken_snapshot_is_named_and_no_fresh_start(harm: str, tmp_path: Path) -> None:
    stopped(tmp_path, 5)
    file = tmp_path / "snapshots" / "step-3" / "tensors.safetensors"
    file.unlink() if harm == "gone" else os.truncate(file, {"empty": 0, "torn": 200}[harm])
    with pytest.raises(CheckpointError, match=r"snapshots/step-3.*start anew with resume=never"):
        run(tmp_path)
    run(tmp_path, resume="never")


def test_a_snapshot_of_another_stage_is_named(tmp_path: Path) -> None:
    stopped(tmp_path, 5, what="sft")
    with pytest.raises(CheckpointError, match=r"step-3/state.json: is of sft, not of reward\."):
        run(tmp_path, what="reward")


@pytest.mark.parametrize(("save_freq", "saved"), [(3, [6, 3]), (7, []), (1, [6, 5, 4, 3, 2, 1]), (-1, [])])
def test_the_end_is_the_model_and_not_saved_beside_it(
    save_freq: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeping_all(folder: Path, **options: Any) -> Snapshots:
        return Snapshots(folder, **options | {"keep": 99})

    monkeypatch.setattr("rein.stages.supervised.Snapshots", keeping_all)
    run(tmp_path, save_freq=save_freq)
    assert Snapshots(tmp_path / "snapshots").numbers() == saved
    forget(tmp_path)
    assert Snapshots(tmp_path / "snapshots").numbers() == []
