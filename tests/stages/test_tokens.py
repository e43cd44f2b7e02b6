"""A tokenizer, template or stop id that changes between two stages is refused, or said by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_rows_accounted import Said

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.errors import DataError
from rein.stages import pipeline

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.fixture
def run(tiny_lm: str, tmp_path: Path) -> Any:
    """A recipe of all stages on its own copy of the model."""
    model = tmp_path / "model"
    shutil.copytree(tiny_lm, model)
    rows = [
        {"prompt": f"{i}+1=", "response": f"#{i + 1}", "reward_model": {"ground_truth": str(i + 1)}}
        for i in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(*words: str) -> Recipe:
        base = f"""
            model.path={model} out={tmp_path}/run threads=1 data.max_response_length=6 data.holdout_fraction=0
            stages=[sft,rollout,score,train,evaluate] sft.files={tmp_path}/rows.jsonl sft.total_steps=1
            sft.batch_size=4 rollout.files={tmp_path}/rows.jsonl data.train_batch_size=4
            actor.ppo_mini_batch_size=4 actor.ppo_epochs=1 trainer.critic_warmup=0
            trainer.total_training_steps=1 evaluate.files={tmp_path}/rows.jsonl evaluate.pass_k=0
        """.split()
        own = 'score.reward={name: exact, options: {marker: "#"}}'
        return load(None, list({word.partition("=")[0]: word for word in (*base, own, *words)}.values()))[0]

    return make


def stages(recipe: Recipe, *names: str) -> list[str]:
    console = Said()
    for name in names:
        pipeline.run_stage(name, recipe, console)
    return [line for line in console.lines if line.startswith("warning")]


def change_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def change_vocabulary(folder: Path) -> None:
    """Two digits change places: every id is still known, and means another token."""
    body = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(body))


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_said_of_a_run_that_keeps_its_tokenizer(run: Any, tmp_path: Path) -> None:
    recipe = run()
    said = stages(recipe, *recipe.stages)
    assert not [line for line in said if "made with" in line]
    marks = [
        json.loads((tmp_path / "run" / stage / "manifest.json").read_text())["facts"]["tokens"]
        for stage in recipe.stages
    ]
    assert all(mark == marks[0] for mark in marks)
    assert set(marks[0]) == {"tokenizer", "chat_template", "stop_ids"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("after", "where", "stage"),
    [
        (("sft",), "sft/model", "rollout"),
        (("sft", "rollout"), "sft/model", "score"),
        (("sft", "rollout", "score"), "sft/model", "train"),
        (("sft", "rollout", "score", "train"), "train/best", "evaluate"),
    ],
)
def test_what_changes_between_two_stages_is_named_at_the_next(
    after: tuple[str, ...], where: str, stage: str, run: Any, tmp_path: Path
) -> None:
    recipe = run()
    stages(recipe, *after)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "run", kept)
    change_template(tmp_path / "run" / where)
    said = stages(recipe, stage)
    assert any("another chat template" in line and "put the former files back" in line for line in said), said
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(kept, tmp_path / "run")
    change_vocabulary(tmp_path / "run" / where)
    with pytest.raises(DataError, match="made with another tokenizer than") as caught:
        stages(recipe, stage)
    assert str(tmp_path / "run" / where) in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_files_carry_their_own_note_to_wherever_they_are_read(run: Any, tmp_path: Path) -> None:
    """The file is given by hand, to a run of another model that no manifest stands beside."""
    stages(run(), "sft", "rollout", "score")
    file = tmp_path / "run" / "score" / "trajectories.parquet"
    words = [f"data.train_files={file}", "stages=[train]", f"out={tmp_path}/other"]
    change_template(tmp_path / "model")
    said = stages(run(*words), "train")
    assert any(
        line.startswith("warning: trajectories.parquet: made with another chat template") for line in said
    )
    (tmp_path / "model" / "chat_template.jinja").unlink()
    change_vocabulary(tmp_path / "model")
    with pytest.raises(
        DataError, match=r"^trajectories\.parquet: made with another tokenizer than .*/model has"
    ):
        stages(run(*words), "train")


@pytest.mark.filterwarnings("ignore")
def test_two_models_of_different_templates_are_compared_loudly(run: Any, tmp_path: Path) -> None:
    other = tmp_path / "other_model"
    shutil.copytree(tmp_path / "model", other)
    change_template(other)
    said = stages(run(f"evaluate.before={tmp_path}/model", f"evaluate.after={other}"), "evaluate")
    assert any("evaluate.before and evaluate.after differ in chat_template" in line for line in said)
