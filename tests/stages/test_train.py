"""Training from a file of stored rows: nothing held out, scores normalised, a scheduled coefficient."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import random_trajectories
from training_made import recipe

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import CheckpointError, Interrupted
from rein.learner import optimizer_steps
from rein.runtime.interrupt import Interrupt
from rein.snapshots import RunState, Snapshots
from rein.stages import train
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics, untimed


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


def three_batches(model: str, folder: Path, **sections: Any) -> list[dict[str, float]]:
    """The metrics of a run over 12 rows that score 0 to 11, four to a batch."""
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(12))]
    write_rows(folder / "rows.parquet", rows, TRAJECTORIES, {})
    some = recipe(
        data={"train_files": [str(folder / "rows.parquet")], "holdout_fraction": 0, "train_batch_size": 4},
        actor={"ppo_mini_batch_size": 4},
        model={"path": model},
        trainer={"critic_warmup": 0},
        **sections,
    ).model_copy(update={"out": str(folder / "run")})
    train.run(some, Console(quiet=True))
    return read_metrics(folder / "run" / "train" / "metrics.jsonl")


def test_scores_are_normalised_once_over_the_rows_that_train(tiny_lm: str, tmp_path: Path) -> None:
    lines = three_batches(tiny_lm, tmp_path, reward_manager={"normalize": "dataset"})
    means = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    assert len(means) == 3
    assert sum(means) == pytest.approx(0, abs=1e-5)
    lowest = min(line["critic/score/min"] for line in lines if "critic/score/min" in line)
    assert lowest == pytest.approx((0 - 5.5) / np.arange(12).std(), rel=1e-5)


def test_a_schedule_goes_by_the_share_of_batches_done(tiny_lm: str, tmp_path: Path) -> None:
    control = {"type": "schedule", "schedule": [[0, 0.06], [1, 0.03]], "shape": "linear"}
    lines = three_batches(tiny_lm, tmp_path, algorithm={"kl_ctrl": control})
    coefs = [line["actor/kl_coef"] for line in lines if "actor/kl_coef" in line]
    assert coefs == pytest.approx([0.06, 0.05, 0.04])


def mixed_recipe(model: str, folder: Path, out: str, **sft: Any) -> Recipe:
    """A batch of four rows and one of three, two epochs each, demonstrations of their prompts beside them."""
    rows = random_trajectories(14)
    write_rows(folder / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES, {})
    mix = {"share": 0.4, "coef": 0.5, "files": [str(folder / "rows.parquet")]}
    some = recipe(
        data={"train_files": [str(folder / "rows.parquet")], "train_batch_size": 4, "holdout_fraction": 1.0},
        actor={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        model={"path": model},
        sft=mix | sft,
        trainer={"critic_warmup": 0, "val_before_train": False},
        evaluate={"reward": [{"name": "length"}]},
    )
    return some.model_copy(update={"out": str(folder / out)})


def test_a_run_that_is_broken_off_goes_on_with_the_next_demonstrations(tiny_lm: str, tmp_path: Path) -> None:
    whole, broken = (mixed_recipe(tiny_lm, tmp_path, out) for out in ("whole", "broken"))
    train.run(whole, Console(quiet=True))
    job, interrupt, done = open_job(broken, Console(quiet=True)), Interrupt(), []

    def advance(steps: int = 1, note: str = "") -> None:
        done.append(steps)
        interrupt.signal_number = 2 * (len(done) == 7)  # in the middle of the first batch's actor updates

    with pytest.raises(Interrupted):
        train.train(job, interrupt, advance)
    job.close()
    train.run(broken, Console(quiet=True))
    one, other = (
        untimed(read_metrics(Path(some.out) / "train" / "metrics.jsonl")) for some in (whole, broken)
    )
    assert one == other
    rows = [line["actor/sft_rows"] for line in one if "actor/sft_rows" in line]
    assert rows == [0, 1, 1, 1, 1, 0, 1, 0]  # .4 of mini-batches of 2 2 2 2 and 2 1 2 1 rows
    assert ["actor/sft_loss" in line for line in one if "actor/sft_rows" in line] == [n > 0 for n in rows]


def test_demonstrations_of_held_out_prompts_are_left_out_and_counted(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = open_job(mixed_recipe(tiny_lm, tmp_path, "run"), Console(), rehearsal=True)
    assert job.learner.imitation is not None
    trained = {tuple(row.prompt_ids) for row in job.train_rows}
    assert {tuple(row.prompt_ids) for row in job.learner.imitation.demonstrations.rows} == trained
    assert "14 demonstrations in, 0 rejected, 7 of held-out prompts, 7 mixed in" in capsys.readouterr().out


def test_other_demonstrations_are_another_run(tiny_lm: str, tmp_path: Path) -> None:
    jobs = [
        open_job(mixed_recipe(tiny_lm, tmp_path, "run", **sft), Console(quiet=True), rehearsal=True)
        for sft in ({}, {"share": 0.5}, {"coef": 1.0}, {"share": 0.0, "coef": 1.0}, {"batch_size": 3})
    ]
    settings = [job.settings for job in jobs]
    assert settings[4] == settings[0]  # what the stage alone reads
    assert all(other["settings"] != settings[0]["settings"] for other in settings[1:4])
    assert settings[3]["rows"] != settings[0]["rows"]


@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, "a frozen copy of the start policy, "), (4, "the actor with its adapters off, no copy")],
)
def test_an_exact_kl_is_measured_against_the_start_policy(
    rank: int, said: str, tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = mixed_recipe(tiny_lm, tmp_path, "run", share=0.0, coef=1.0)
    model = some.model.model_copy(update={"lora_rank": rank})
    actor = some.actor.model_copy(update={"kl_loss_type": "full"})
    train.run(some.model_copy(update={"model": model, "actor": actor}), Console())
    assert f"reference: {said}" in capsys.readouterr().out
    lines = read_metrics(tmp_path / "run" / "train" / "metrics.jsonl")
    kls = [line["actor/kl_loss"] for line in lines if "actor/kl_loss" in line]
    assert kls[0] == 0 < kls[1] < kls[-1]


def test_without_an_exact_kl_no_reference_is_kept(tiny_lm: str, tmp_path: Path) -> None:
    job = open_job(mixed_recipe(tiny_lm, tmp_path, "run"), Console(quiet=True), rehearsal=True)
    assert job.maker.reference is None


def test_the_head_holds_as_many_logits_as_the_recipe_says(tiny_lm: str, tmp_path: Path) -> None:
    some = mixed_recipe(tiny_lm, tmp_path, "run")
    assert open_job(some, Console(quiet=True), rehearsal=True).actor.logits_chunk == some.model.logits_chunk
    less = some.model_copy(update={"model": some.model.model_copy(update={"logits_chunk": 77})})
    assert open_job(less, Console(quiet=True), rehearsal=True).actor.logits_chunk == 77


@pytest.mark.parametrize("method", ["ppo", "grpo"])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_steps_are_counted_as_the_batches_are_cut(
    method: str, steps: int, tiny_lm: str, tmp_path: Path
) -> None:
    groups = [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4]  # prompts of one to four rows
    rows = random_trajectories(len(groups))
    made = [
        trajectory_row(row.with_score(float(i)))
        | {"prompt_ids": rows[group].prompt_ids.tolist(), "group": f"prompt {group}"}
        for i, (group, row) in enumerate(zip(groups, rows, strict=True))
    ]
    write_rows(tmp_path / "rows.parquet", made, TRAJECTORIES, {})
    words = f"""
        algorithm.method={method} model.path={tiny_lm} data.train_files={tmp_path}/rows.parquet
        data.holdout_fraction=0 data.train_batch_size=8 actor.ppo_mini_batch_size=2 actor.ppo_epochs=1
        trainer.critic_warmup=0 trainer.total_training_steps={steps} out={tmp_path}/run
    """
    some = load(None, words.split())[0]
    job = open_job(some, Console(quiet=True), rehearsal=True)
    cut = Counter(len(job.rows_of(batch)) for batch in range(steps))
    assert cut.total() == steps
    assert job.learner.optimizers["actor"].total_steps == optimizer_steps(some, "actor", cut)


def test_a_billion_steps_are_counted_at_once(tiny_lm: str, tmp_path: Path) -> None:
    some = mixed_recipe(tiny_lm, tmp_path, "run")
    steps = some.trainer.model_copy(update={"total_training_steps": 10**9 + 1})
    job = open_job(some.model_copy(update={"trainer": steps}), Console(quiet=True), rehearsal=True)
    # Batches of four and three rows, in two mini-batches, two epochs each.
    assert job.learner.optimizers["actor"].total_steps == (10**9 + 1) * 4


def test_resuming_from_what_is_no_snapshot_of_train_says_what_to_give(tiny_lm: str, tmp_path: Path) -> None:
    ring = Snapshots(tmp_path / "sft", kind="sft")
    other = ring.save(3, RunState({"w": torch.zeros(2)}, {"settings": "abc"}))
    for wanted, said in (
        (str(other), "state.json: is of sft, not of train"),
        (f"{tmp_path}/nowhere", "not a whole snapshot"),
    ):
        some = mixed_recipe(tiny_lm, tmp_path, "run").model_copy(update={"resume": wanted})
        with pytest.raises(CheckpointError, match=rf"^resume: .*{said}.*; give a folder such as"):
            train.run(some, Console(quiet=True))
