"""The line of `rein check` about guards: what it counts, and that its disk is what a run takes."""

from pathlib import Path
from typing import Any

import pytest
from rows_made import random_trajectories
from training_made import recipe

from rein.commands.check_guards import guards_line, snapshot_bytes
from rein.commands.check_memory import Parts, estimate
from rein.commands.check_plan import Plan
from rein.commands.check_shapes import sizes
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.guards.presets import guards_of
from rein.stages import train
from rein.tracking.console import Console

BLIND = "val/* rules see nothing between the start and the end"


def line(batches: int = 10, parts: Parts | None = None, **sections: Any) -> str:
    some = recipe(**{"guards": {"preset": "standard"}, "trainer": {"test_freq": 1}} | sections)
    return guards_line(some, Plan("train", batches=batches), parts)


def test_the_line_names_preset_rules_intervals_and_disk() -> None:
    count = len(guards_of(recipe(guards={"preset": "standard"}).guards))
    assert line(parts=Parts(adam=2.0 * 2**30)) == (
        f"guards: standard, {count} rules; probe every 8 updates; snapshot every 32, at most 5 kept: "
        "~15,360 MiB"
    )


def test_a_recipes_own_rule_is_counted_and_one_of_the_presets_name_is_not() -> None:
    own = {"metric": "probe/entropy", "below": 0.1}
    named = {"name": "kl_high", "above": 0.2}
    counts = [
        int(line(guards={"preset": "standard", "rules": rules}).split(" rule")[0].split()[-1])
        for rules in ([], [named], [named, own])
    ]
    assert counts[1:] == [counts[0], counts[0] + 1]


def test_without_rules_nothing_is_rolled_back() -> None:
    assert line(guards={"preset": "off"}, parts=Parts(adam=2**20)) == (
        "guards: off, 1 rule; probe every 8 updates; snapshots for resume alone, at most 2 kept: ~3 MiB"
    )


def test_a_model_of_unknown_size_has_no_disk_to_name() -> None:
    assert line().endswith("at most 5 kept")


@pytest.mark.parametrize(
    ("batches", "test_freq", "why"),
    [(10, 1, ""), (10, 9, ""), (10, 10, "10"), (10, -1, "-1"), (2, 1, ""), (1, 1, "1 batch")],
)
def test_rules_that_cannot_see_before_the_end_are_named(batches: int, test_freq: int, why: str) -> None:
    said = line(batches, trainer={"test_freq": test_freq})
    assert (BLIND in said) == bool(why)
    assert why in said
    assert BLIND not in line(batches, trainer={"test_freq": test_freq}, guards={"preset": "off"})


def test_the_disk_is_what_a_runs_snapshots_take(tiny_lm: str, tmp_path: Path) -> None:
    rows = [trajectory_row(row) for row in random_trajectories(12)]
    write_rows(tmp_path / "rows.parquet", rows, TRAJECTORIES, {})
    never = {"metric": "probe/entropy", "below": -1, "then": "rollback"}
    some = recipe(
        data={"train_files": [str(tmp_path / "rows.parquet")], "train_batch_size": 2},
        actor={"ppo_mini_batch_size": 1},
        model={"path": tiny_lm},
        trainer={"critic_warmup": 0},
        guards={"preset": "off", "rules": [never], "snapshot_every": 2, "confirm_steps": 2},
    ).model_copy(update={"out": str(tmp_path / "run")})
    parts = estimate(some, {"train": Plan("train")}, sizes(some))["train"]
    train.run(some, Console(quiet=True))
    found = list((tmp_path / "run" / "train" / "snapshots").glob("step-*/tensors.safetensors"))
    assert 2 <= len(found) <= 5
    assert "at most 5 kept" in guards_line(some, Plan("train", batches=6), parts)
    largest = max(file.stat().st_size for file in found)
    assert largest == pytest.approx(snapshot_bytes(parts), rel=0.1)
