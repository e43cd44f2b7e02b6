"""Held-out stored rows in train and in evaluate: nothing is generated, and the numbers are recounted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_made import own_log_probs, random_trajectories
from training_made import moved, recipe

from rein.config.recipe import Export, Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import DataError
from rein.models.actor import load_actor
from rein.stages import evaluate, pipeline, train
from rein.stages.off_policy_evaluation import stored
from rein.stages.train_job import Job
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics
from rein.types import Trajectory

QUIET = Console(quiet=True)
PROMPTS, ANSWERS = 40, 4


def answered(model: str) -> list[Trajectory]:
    """Answers with the model's own log-probs, four to a prompt; long ones score more."""
    actor, asked = load_actor(model), random_trajectories(PROMPTS)
    made = []
    for i, row in enumerate(random_trajectories(PROMPTS * ANSWERS, seed=1)):
        prompt = asked[i // ANSWERS].prompt_ids
        whole = Trajectory(
            where=f"row {i}",
            messages=f"prompt {i // ANSWERS}",
            prompt_ids=prompt,
            response_ids=row.response_ids,
            response_mask=np.ones(len(row.response_ids), dtype=np.bool_),
            score=len(row.response_ids) / 9,
        )
        log_probs = own_log_probs(actor.model, whole).float().detach().numpy()
        made.append(trajectory_row(whole) | {"behavior_log_probs": log_probs.tolist()})
    return made  # type: ignore[return-value]


def stored_recipe(model: str, folder: Path, **sections: dict[str, object]) -> Recipe:
    file = folder / "rows.parquet"
    if not file.exists():
        write_rows(file, answered(model), TRAJECTORIES, {})
    return recipe(
        data={"train_files": [str(file)], "holdout_fraction": 0.5, "train_batch_size": 40},
        actor={"ppo_mini_batch_size": 20},
        model={"path": model},
        evaluate={"generate": False} | sections.pop("evaluate", {}),
        **sections,
    ).model_copy(update={"out": str(folder / "run")})


def test_evaluate_without_generating(tiny_lm: str, tmp_path: Path) -> None:
    """Before is who wrote the rows: its estimates are their mean score; after is trusted no more."""
    other = load_actor(tiny_lm)
    moved(other.model, 3, size=1.0)
    other.save(tmp_path / "other")
    some = stored_recipe(tiny_lm, tmp_path, evaluate={"before": tiny_lm, "after": str(tmp_path / "other")})
    pipeline.run_stage("evaluate", some, QUIET)
    facts = json.loads((tmp_path / "run" / "evaluate" / "manifest.json").read_text())
    written = json.loads((tmp_path / "run" / "evaluate" / "evaluation.json").read_text())
    found = written["off_policy"]
    assert written["generated"] is False
    assert (found["prompts"], found["rows"]) == (PROMPTS // 2, PROMPTS // 2 * ANSWERS)
    assert facts["rows"]["weighed"] + facts["rows"]["trained"] == facts["rows"]["in"]
    before, after = found["before"], found["after"]
    scores = {round(side["score"], 5) for side in before["estimates"].values()}
    assert len(scores) == 1  # on-policy all estimators are the mean
    assert before["trust"]
    assert before["mean_weight"] == pytest.approx(1, abs=1e-4)
    assert before["kl_behavior"] == pytest.approx(0, abs=1e-6)
    assert not after["trust"]
    assert after["reasons"]
    assert not found["trust"]
    exported = some.model_copy(update={"export": Export(path=str(tmp_path / "other"), force=True)})
    pipeline.run_stage("export", exported, QUIET)
    card = (tmp_path / "run" / "export" / "model" / "README.md").read_text()
    assert f"{PROMPTS // 2 * ANSWERS} stored answers to {PROMPTS // 2} prompts" in card
    assert "**They are not to be trusted.**" in card
    assert after["reasons"][0] in card
    gap = found["difference"]["control_variate"]
    sides = [side["estimates"]["control_variate"]["score"] for side in (before, after)]
    assert gap["score"] == pytest.approx(sides[1] - sides[0])
    assert gap["ci95"][0] < gap["score"] < gap["ci95"][1]


def test_training_keeps_the_best_by_its_lower_end(tiny_lm: str, tmp_path: Path) -> None:
    """Nothing is generated, ope/ is logged, and best has the highest ope/low of those that are trusted."""
    some = stored_recipe(tiny_lm, tmp_path, trainer={"critic_warmup": 0, "total_epochs": 2, "test_freq": 1})
    facts = train.run(some, QUIET)
    lines = read_metrics(tmp_path / "run" / "train" / "metrics.jsonl")
    judged = [line for line in lines if "ope/score" in line]
    assert len(judged) == 1 + 2 * 2  # the start, and each batch
    assert not any(key.startswith("val/") for line in lines for key in line)
    trusted = [line["ope/low"] for line in judged if line["ope/trust"]]
    assert facts["best"]["ope/low"] == max(trusted)
    for line in judged:
        assert line["ope/low"] < line["ope/score"] < line["ope/high"]
        assert 0 < line["ope/ess"] <= PROMPTS // 2 * ANSWERS + 1e-6


@pytest.mark.parametrize("first", ["val/score", "ope/low"])
def test_a_best_of_one_kind_is_not_held_against_another(first: str) -> None:
    """Nothing is saved, or this job, which has no more than its best, would fail."""
    job = Job.__new__(Job)
    job.best = {first: 0.5, "number": 3}
    other = {"val/score": {"ope/low": 0.9, "ope/trust": 1.0}, "ope/low": {"val/score": 0.9}}
    assert not job._take_best(other[first])
    assert job.best == {first: 0.5, "number": 3}


def test_rows_that_cannot_be_weighed(tiny_lm: str, tmp_path: Path) -> None:
    """No score or no log-probs: left out; none left: said with what to do."""
    rows = random_trajectories(4)
    rows[0] = rows[0].with_score(0.25)
    kept = stored([rows[0], rows[1].with_score(None), *random_trajectories(2, behavior=False)])
    assert kept is not None
    assert [row.where for row in kept.rows] == [rows[0].where]
    assert kept.rewards.sum().item() == 0.25
    assert torch.equal(kept.mask[0].nonzero()[-1], kept.rewards[0].nonzero()[-1])
    write_rows(
        tmp_path / "rows.parquet",
        [trajectory_row(row) for row in random_trajectories(40, behavior=False)],
        TRAJECTORIES,
        {},
    )
    with pytest.raises(DataError, match="behavior_log_probs"):
        evaluate.run(stored_recipe(tiny_lm, tmp_path, evaluate={"before": tiny_lm, "after": tiny_lm}), QUIET)
