"""Where a training run's time goes: verl's names in metrics.jsonl, phases that add up, the summary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rows_made import random_trajectories
from training_made import recipe

from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.runtime.peak import core_flops
from rein.snapshots import Snapshots
from rein.stages import pipeline, train
from rein.stages.train_pace import GROUPS, MODELS, UPDATES, Pace
from rein.tracking.console import Console
from rein.tracking.jsonl import TIMES, read_metrics, untimed

QUIET = Console(quiet=True)
OF_VERL = {
    *(f"timing_s/{name}" for name in ("old_log_prob", "values", "adv", "update_critic", "update_actor")),
    *("timing_s/testing", "timing_s/reward", "timing_s/save_checkpoint", "timing_s/step"),
    *(f"timing_per_token_ms/{name}" for name in ("update_actor", "update_critic", "values", "adv")),
    *("perf/total_num_tokens", "perf/time_per_step", "perf/throughput", "perf/mfu/actor", "perf/mfu/critic"),
    "perf/peak_resident_gb",
}


def timed(model: str, folder: Path, **sections: Any) -> Recipe:
    """Three batches of four rows and a fit of two updates; the first prompts are held out too."""
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(24))]
    write_rows(folder / "rows.parquet", rows, TRAJECTORIES, {})
    data = {"train_files": [str(folder / "rows.parquet")], "train_batch_size": 4, "holdout_fraction": 1.0}
    some = recipe(
        data=data,
        actor={"ppo_mini_batch_size": 2},
        model={"path": model},
        evaluate={"reward": [{"name": "length"}]},
        **{"trainer": {"critic_warmup": 2, "val_prompts": 2, "test_freq": 1, "save_freq": 1}} | sections,
    )
    return some.model_copy(update={"out": str(folder / "run"), "cache": str(folder / "cache")})


def lines_of(some: Recipe) -> list[dict[str, Any]]:
    return read_metrics(Path(some.out) / "train" / "metrics.jsonl")


@pytest.fixture(scope="module")
def run(tiny_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    some = timed(tiny_lm, tmp_path_factory.mktemp("timed"))
    pipeline.run_stage("train", some, QUIET)
    return some


def steps(some: Recipe) -> list[dict[str, Any]]:
    return [line for line in lines_of(some) if "timing_s/step" in line]


def test_each_step_is_logged_under_verls_names(run: Recipe) -> None:
    assert len(steps(run)) == 3
    for line in steps(run):
        assert line.keys() >= OF_VERL | {"timing_s/probe", "perf/cpu_seconds_per_token"}
        assert {name.partition("/")[0] for name in line} == {"number", *(part.rstrip("/") for part in TIMES)}


def test_phases_add_up_to_the_step_with_little_in_none(run: Recipe) -> None:
    in_none = []
    for line in steps(run):
        parts = {name: s for name, s in line.items() if name.startswith("timing_s/")}
        step = parts.pop("timing_s/step")
        assert sum(parts.values()) == pytest.approx(step)
        assert line["perf/time_per_step"] == step
        in_none.append(parts["timing_s/other"] / step)
    assert min(in_none) < 0.1  # of the calmest: the machine may be busy


def test_tokens_are_the_batch_s_each_once(run: Recipe) -> None:
    made = [len(row.prompt_ids) + len(row.response_ids) for row in random_trajectories(24)]
    assert 0 < sum(line["perf/total_num_tokens"] for line in steps(run)) < sum(made)  # some are held out
    for line in steps(run):
        tokens = line["perf/total_num_tokens"]
        assert line["perf/throughput"] == pytest.approx(tokens / line["timing_s/step"])
        per_token = line["timing_per_token_ms/update_actor"]
        assert per_token == pytest.approx(1000 * line["timing_s/update_actor"] / tokens)
        assert 0 < line["perf/cpu_seconds_per_token"] * tokens < 2 * line["timing_s/step"]
        assert 0 < line["perf/mfu/actor"] < 1
        assert 0 < line["perf/mfu/critic"] < 1
        assert 0.05 < line["perf/peak_resident_gb"] < 100


def test_all_lines_together_are_the_whole_stage(run: Recipe) -> None:
    seconds = sum(
        s
        for line in lines_of(run)
        for name, s in line.items()
        if name.startswith("timing_s/") and name != "timing_s/step"
    )
    manifest = json.loads((Path(run.out) / "train" / "manifest.json").read_text())
    speed = manifest["facts"]["speed"]
    assert seconds == pytest.approx(speed["seconds"], abs=0.05)
    assert (
        speed["seconds"] == manifest["facts"]["train_seconds"] == pytest.approx(manifest["seconds"], abs=0.5)
    )
    assert sum(speed["phases"].values()) == pytest.approx(speed["seconds"], abs=0.05)
    assert sum(speed["shares"].values()) == pytest.approx(1, abs=1e-3)
    of_models = sum(speed["phases"].get(phase, 0) for phase in MODELS)
    assert speed["outside_models"] == pytest.approx(1 - of_models / speed["seconds"], abs=1e-2)
    assert 0 < speed["outside_models_cpu"] < 1
    assert speed["tokens"] == sum(line["perf/total_num_tokens"] for line in steps(run))
    assert set(speed["mfu"]) == {"actor", "critic"}
    assert speed["phases"]["critic_fit"] > 0


def test_neither_guards_nor_snapshots_know_of_times(run: Recipe) -> None:
    ring = Snapshots(Path(run.out) / "train" / "snapshots")
    state, _ = ring.newest()
    assert state is not None
    assert not any(name.startswith(TIMES) for name in state.meta["last"])


def test_a_rule_on_a_time_reads_nothing_and_is_said(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = {"metric": "perf/throughput", "above": -1}
    some = timed(tiny_lm, tmp_path, guards={"preset": "off", "rules": [rule]})
    train.run(some, Console())
    said = capsys.readouterr().out
    assert "guards.rules: perf/throughput was not there in the first batch" in said
    assert "guard: " not in said
    (first, second, third) = [
        line for line in said.splitlines() if line.startswith(("speed", "time", "phases"))
    ]
    assert first.startswith("speed: ")
    assert " tokens/s, " in first
    assert " CPU-s per 1,000 tokens, MFU " in first
    assert second.startswith("time: ")
    for name in (*GROUPS, "rest", "outside models"):
        assert f"{name} " in second
    assert "update_actor " in third


def test_runs_are_equal_but_for_times(run: Recipe, tiny_lm: str, tmp_path: Path) -> None:
    some = timed(tiny_lm, tmp_path)
    train.run(some, QUIET)
    assert untimed(lines_of(some)) == untimed(lines_of(run))
    assert lines_of(some) != lines_of(run)


def test_mfu_is_useful_work_over_what_a_core_could_have_done(
    run: Recipe, tiny_lm: str, tmp_path: Path
) -> None:
    some = timed(tiny_lm, tmp_path)
    job = train.open_job(some, QUIET)
    rows = job.rows_of(0)
    with job.clock("update_actor", job.pace.work("actor", rows)):
        torch.ones(300, 300) @ torch.ones(300, 300)
    spent = job.clock.whole()
    share = job.pace.metrics(rows)["perf/mfu/actor"]
    work, cpu = job.pace.flops["actor"].update(rows), spent.cpu["update_actor"]
    assert share == pytest.approx(work / (cpu * core_flops(torch.float32)))
    assert "perf/mfu/critic" not in job.pace.metrics(rows)  # it had no update
    job.close()


def test_no_mfu_where_experts_are_chosen(tiny_lm: str, tmp_path: Path) -> None:
    job = train.open_job(timed(tiny_lm, tmp_path), QUIET, rehearsal=True)
    assert job.critic is not None
    job.actor.model.register_parameter("experts", torch.nn.Parameter(torch.zeros(2, 3, 3)))
    assert not Pace(job.clock, job.actor, job.critic).has_mfu


def test_every_update_phase_is_a_model_s() -> None:
    assert {phase for phases in UPDATES.values() for phase in phases} <= set(MODELS)
