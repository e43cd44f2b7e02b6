"""`algorithm.method: auto`: training obeys the audit's verdict and says so, or does not begin."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rows_made import random_trajectories

from rein.commands import audit as command
from rein.commands import check
from rein.commands.check_audit import audited
from rein.config.load import dump, load, settled_by
from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import PREFERENCES, PROMPTS, TRAJECTORIES, trajectory_row
from rein.errors import DataError
from rein.stages import pipeline, train
from rein.tracking.console import Console
from rein.types import Trajectory

QUIET = Console(quiet=True)
ROWS = [  # log-probs that nobody's model gave them
    dataclasses.replace(row, group=f"prompt {i // 2}", score=float(i % 2))
    for i, row in enumerate(random_trajectories(160))
]


def of(rows: list[Trajectory], model: str, folder: Path, *words: str) -> Recipe:
    write_rows(folder / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES, {})
    base = [
        f"model.path={model}",
        f"data.train_files={folder}/rows.parquet",
        f"out={folder}/run",
        "stages=[train]",
        "threads=1",
        "algorithm.method=auto",
        "data.train_batch_size=32",
        "actor.ppo_mini_batch_size=32",
        "actor.ppo_epochs=1",
        "data.holdout_fraction=0",
        "trainer.critic_warmup=0",
        "trainer.total_training_steps=1",
        "data.max_response_length=9",
        "rollout.max_new_tokens=4",
    ]
    given = {word.partition("=")[0] for word in words}
    return load(None, [*(word for word in base if word.partition("=")[0] not in given), *words])[0]


def test_training_follows_the_verdict_and_its_manifest_says_so(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = of(ROWS, tiny_lm, tmp_path)
    facts = train.run(recipe, Console())
    said = capsys.readouterr().out
    assert "algorithm.method: auto -> ppo data.behavior=unknown" in said
    assert "rollout_correction: auto -> none" in said
    assert facts["audit"]["settings"] == {"data.behavior": "unknown"}
    assert facts["audit"]["reasons"][0]["finding"] == "wrong model"


def test_what_the_recipe_gives_itself_holds(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(of(ROWS, tiny_lm, tmp_path, "data.behavior=stored"), Console())
    said = capsys.readouterr().out
    assert "data.behavior=stored is given and holds" in said
    assert "token weights old / behavior" in said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (ROWS[:20], "20 usable rows of 20 prompts are too few: give 128 rows or more"),
        ([row.with_score(0.5) for row in ROWS], "every answer scores the same"),
    ],
)
def test_what_should_not_be_trained_on_is_not(
    rows: list[Trajectory], said: str, tiny_lm: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"the audit says not to train: .*{said}"):
        train.run(of(rows, tiny_lm, tmp_path), QUIET)
    assert not (tmp_path / "run" / "train" / "best").exists()


def test_rows_of_prompts_to_leave_out_are_counted(tiny_lm: str, tmp_path: Path) -> None:
    asked = [{"prompt": "x", "prompt_ids": row.prompt_ids} for row in ROWS[:10]]
    schema = PROMPTS.append(TRAJECTORIES.field("prompt_ids"))
    write_rows(tmp_path / "test.parquet", asked, schema, {})
    own = ("evaluate.files=" + str(tmp_path / "test.parquet"),)
    facts = train.run(of(ROWS, tiny_lm, tmp_path, *own), QUIET)
    counts = facts["rows"]
    assert facts["audit"]["settings"]["data.leave_out"] == [str(tmp_path / "test.parquet")]
    assert counts["left_out"] >= 10
    assert counts["in"] == counts["left_out"] + counts["trained"] + counts["held_out"] + counts["rejected"]


def test_a_recipe_that_a_run_wrote_still_follows_the_verdict(tiny_lm: str, tmp_path: Path) -> None:
    recipe = of(ROWS, tiny_lm, tmp_path)
    dump(recipe, tmp_path / "written.json")
    again = load(tmp_path / "written.json", [])[0]
    assert train.run(again, QUIET)["audit"]["settings"] == {"data.behavior": "unknown"}
    assert settled_by(again, "awr", {})[0].actor.policy_loss.loss_mode == "awr"


def test_other_evaluation_prompts_make_auto_train_anew(tiny_lm: str, tmp_path: Path) -> None:
    def asked(rows: list[Trajectory], name: str) -> str:
        schema = PROMPTS.append(TRAJECTORIES.field("prompt_ids"))
        write_rows(tmp_path / name, [{"prompt": "x", "prompt_ids": r.prompt_ids} for r in rows], schema, {})
        return f"evaluate.files={tmp_path / name}"

    first = of(ROWS, tiny_lm, tmp_path, asked(random_trajectories(5, seed=9), "one.parquet"))
    pipeline.run(first, QUIET)
    manifest = tmp_path / "run" / "train" / "manifest.json"
    assert json.loads(manifest.read_text())["rows"].get("left_out", 0) < 5
    pipeline.run(of(ROWS, tiny_lm, tmp_path, asked(ROWS[:5], "two.parquet")), QUIET)
    assert json.loads(manifest.read_text())["rows"]["left_out"] >= 5


def test_what_is_left_out_is_left_out_for_both(tiny_lm: str) -> None:
    recipe = load(None, ["algorithm.method=auto", "data.leave_out=[a.parquet]"])[0]
    found, notes = settled_by(recipe, "ppo", {"data.leave_out": ["b.parquet", "a.parquet"]})
    assert list(found.data.leave_out) == ["a.parquet", "b.parquet"]
    assert notes == []


def test_a_kl_loss_is_of_one_kind_in_a_run(tiny_lm: str, tmp_path: Path) -> None:
    mixed = [
        dataclasses.replace(row, behavior_log_probs=None) if i < 8 else row for i, row in enumerate(ROWS)
    ]
    words = ("algorithm.method=ppo", "algorithm.rollout_correction.rollout_is=null")
    with pytest.raises(
        DataError, match=r"8 of 160 rows have no behavior_log_probs; .*data\.behavior=unknown"
    ):
        train.run(of(mixed, tiny_lm, tmp_path, *words), QUIET)
    assert train.run(of(mixed, tiny_lm, tmp_path), QUIET)["audit"]["settings"] == {"data.behavior": "unknown"}


def test_check_holds_the_recipe_against_the_audit_of_its_rows(tiny_lm: str, tmp_path: Path) -> None:
    recipe = of(ROWS, tiny_lm, tmp_path)
    lines, warnings = audited(recipe)
    assert (len(lines), warnings) == (1, [])
    words = [f"out={tmp_path / 'run'}", "data.max_response_length=9", f"model.path={tiny_lm}"]
    command.run([str(tmp_path / "rows.parquet"), *words], QUIET)
    facts = json.loads((tmp_path / "run" / "audit" / "audit.json").read_text())
    assert facts["verdict"]["settings"] == {"data.behavior": "unknown"}
    assert facts["model"]["rows"] == len(ROWS)
    lines, warnings = audited(recipe)
    assert lines[0] == "audit: train, within limits"
    assert warnings == []
    _, warnings = audited(of(ROWS, tiny_lm, tmp_path, "algorithm.method=topr"))
    assert "the audit asks for data.behavior=unknown, the recipe has None" in warnings[0]
    of(ROWS[:-1], tiny_lm, tmp_path)  # other rows under the same name
    assert audited(recipe)[0][0].startswith("algorithm.method auto")


def test_pairs_under_auto_are_planned_and_trained_as_dpo(tiny_lm: str, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(160)]
    write_rows(tmp_path / "pairs.parquet", pairs, PREFERENCES, {})
    recipe = of(ROWS, tiny_lm, tmp_path, f"data.train_files={tmp_path / 'pairs.parquet'}")
    assert "critic" not in check.run(recipe, QUIET)["sizes"]
    assert train.run(recipe, QUIET)["audit"]["method"] == "dpo"


def test_a_method_lies_beneath_what_is_given() -> None:
    recipe = load(None, ["algorithm.method=auto", "actor.use_kl_loss=true"])[0]
    found, notes = settled_by(recipe, "awr", {"data.behavior": "unknown", "data.leave_out": ["a.parquet"]})
    assert found.algorithm.method == "awr"
    assert found.actor.policy_loss.loss_mode == "awr"
    assert found.data.behavior == "unknown"
    assert list(found.data.leave_out) == ["a.parquet"]
    assert notes == []
    again, notes = settled_by(found, "awr", {"data.behavior": "stored"})
    assert again.data.behavior == "unknown"
    assert notes == ["data.behavior=unknown is given and holds"]
    assert np.isclose(found.actor.optim.lr, recipe.actor.optim.lr)
