"""`rein run`: stages in order, done ones skipped, a failed one leaves a run that goes on from there."""

import json
from pathlib import Path

import pytest

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data import addition
from rein.errors import ConfigError, DataError, GateFailed, UserCodeError
from rein.stages import pipeline
from rein.tracking.console import Console


class Said(Console):
    """A console that keeps what is said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @property
    def skipped(self) -> list[str]:
        return [line.partition(":")[0] for line in self.lines if line.endswith("skipped")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    addition.write(folder, 0)
    return folder


def small(tiny: Path, data: Path, out: Path, *words: str) -> Recipe:
    """Everything of the demo, little of it."""
    own = f"""
        out={out} model.path={tiny} threads=1 seed=0 data.max_prompt_length=16 data.max_response_length=12
        stages=[sft,rollout,score,train,evaluate,export,report]
        sft.files={data}/demonstrations.parquet sft.total_steps=2 sft.batch_size=8
        data.max_bad_fraction=0.02 rollout.files={data}/prompts.parquet rollout.max_prompts=136 rollout.n=1
        data.train_batch_size=32 actor.ppo_mini_batch_size=16 actor.ppo_epochs=1 trainer.critic_warmup=1
        trainer.total_training_steps=1 trainer.val_prompts=4 data.val_files={data}/dev.parquet
        evaluate.files={data}/test.parquet evaluate.max_prompts=8 evaluate.pass_k=0 gate.enable=false
    """.split()
    own += ["data.max_response_length=48", 'score.reward={name: exact, options: {marker: "#"}}']
    given = {word.partition("=")[0] for word in words}
    latest = {word.partition("=")[0]: word for word in own if word.partition("=")[0] not in given}
    return load(None, [*latest.values(), *words])[0]


@pytest.fixture(scope="module")
def done(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "small"
    pipeline.run(small(tiny, data, out), Said())
    return out


def test_a_run_leaves_summary_manifests_and_the_resolved_recipe(tiny: Path, data: Path, done: Path) -> None:
    recipe = small(tiny, data, done)
    summary = json.loads((done / "summary.json").read_text())
    assert {"before", "after", "lift", "lift_ci95", "seconds", "stages"} <= set(summary)
    assert summary["before"]["n"] == summary["after"]["n"] == 8
    assert list(summary["stages"]) == list(recipe.stages)
    assert summary["seconds"] >= sum(summary["stages"].values()) - 0.1
    assert load(done / "recipe.json") == (recipe, [])
    for stage in recipe.stages:
        body = json.loads((done / stage / "manifest.json").read_text())
        assert body["stage"] == stage
        counts = body["rows"]
        if "trained" in counts:
            assert counts["in"] == counts["rejected"] + counts.get("held_out", 0) + counts["trained"]


def test_a_second_run_skips_everything_and_says_so(tiny: Path, data: Path, done: Path) -> None:
    console, before = Said(), (done / "train" / "manifest.json").read_bytes()
    summary = json.loads((done / "summary.json").read_text())
    again = pipeline.run(small(tiny, data, done), console)
    assert console.skipped == ["sft", "rollout", "score", "train", "evaluate", "export", "report"]
    assert (done / "train" / "manifest.json").read_bytes() == before
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}


def test_other_settings_redo_the_stage_and_what_depends_on_it(tiny: Path, data: Path, done: Path) -> None:
    console = Said()
    pipeline.run(small(tiny, data, done, "evaluate.max_prompts=6"), console)
    assert console.skipped == ["sft", "rollout", "score", "train"]  # the model card tells of the evaluation
    assert json.loads((done / "summary.json").read_text())["before"]["n"] == 6


def test_a_lost_result_is_made_again(tiny: Path, data: Path, done: Path) -> None:
    (done / "score" / "trajectories.parquet").unlink()
    console = Said()
    pipeline.run(small(tiny, data, done), console)
    assert "score" not in console.skipped
    assert "train" in console.skipped  # the same scores came out


def test_a_failed_stage_leaves_the_earlier_ones_done(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "broken_reward.py"
    module.write_text("def score(*args, **options):\n    raise KeyError('no such column')\n")
    words = ("score.reward=broken_reward:score", "stages=[sft,rollout,score]")
    with pytest.raises(UserCodeError, match="no such column"):
        pipeline.run(small(tiny, data, tmp_path / "run", *words), Said())
    left = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*")}
    assert "summary.json" not in left
    assert not any("score/" in name for name in left)
    assert not any(name.rpartition("/")[2].startswith(".") for name in left)
    console = Said()
    pipeline.run(small(tiny, data, tmp_path / "run", "stages=[sft,rollout,score]"), console)
    assert console.skipped == ["sft", "rollout"]


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("model.path=./nothere",), ConfigError, "./nothere does not exist"),
        (("evaluate.files=nothere.parquet",), DataError, "nothere.parquet"),
        (("data.val_files=nothere.parquet",), DataError, "nothere.parquet"),
        (("score.reward=exactly",), ConfigError, "did you mean exact?"),
        (('score.reward=""',), ConfigError, "'' is unknown; known: gsm8k"),
        (('score.reward=":f"',), ConfigError, "cannot import ''"),
        ((f"score.reward={'m' * 300}:f",), ConfigError, "check the name and PYTHONPATH"),
        (("stages=[score,train]",), DataError, "score.files"),
        (("stages=[evaluate]",), ConfigError, "run `rein train`"),
    ],
)
def test_what_cannot_finish_does_not_begin(
    words: tuple[str, ...], error: type[Exception], said: str, tiny: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        pipeline.run(small(tiny, data, tmp_path / "run", *words), Said())
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_stage_by_itself_writes_its_manifest_and_names_what_is_missing(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    recipe = small(tiny, data, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run `rein sft` with this recipe first"):
        pipeline.run_stage("rollout", recipe, Said())
    pipeline.run_stage("sft", recipe, Said())
    assert (tmp_path / "run" / "sft" / "manifest.json").exists()
    console = Said()
    pipeline.run(small(tiny, data, tmp_path / "run", "stages=[sft,rollout]"), console)
    assert console.skipped == ["sft"]


def test_every_stage_is_listed() -> None:
    from typing import get_args

    from rein.config.recipe import Stage

    assert set(pipeline.MODULES) == set(get_args(Stage))


# The gate


def test_a_run_that_the_gate_refuses_exports_nothing_and_still_reports(
    tiny: Path, data: Path, done: Path
) -> None:
    before = (done / "export" / "model" / "model.safetensors").read_bytes()
    console = Said()
    with pytest.raises(GateFailed, match=r"min_prompts: prompts judged 8 is below 50, by 42.*--force"):
        pipeline.run(small(tiny, data, done, "gate.enable=true"), console)
    assert not (done / "export" / "manifest.json").exists()
    assert (done / "export" / "model" / "model.safetensors").read_bytes() == before
    assert console.skipped == ["sft", "rollout", "score", "train", "evaluate", "report"]  # goes on to the end
    gate = json.loads((done / "summary.json").read_text())["gate"]
    assert gate["asked"]
    assert not gate["passed"]
    assert {"min_prompts", "min_lift_low"} <= {line["check"] for line in gate["lines"] if not line["passed"]}


def test_what_is_forced_is_recorded_in_manifest_and_card(tiny: Path, data: Path, done: Path) -> None:
    pipeline.run(small(tiny, data, done, "gate.enable=true", "export.force=true"), Said())
    gate = json.loads((done / "export" / "manifest.json").read_text())["facts"]["gate"]
    assert gate["forced"]
    card = (done / "export" / "model" / "README.md").read_text()
    assert "**FAILED, and exported by force.**" in card
    assert "| min_prompts | **failed** | prompts judged 8 is below 50, by 42 |" in card
    for stage in ("sft", "score", "train", "evaluate"):
        for digest in json.loads((done / stage / "manifest.json").read_text())["inputs"].values():
            assert digest in card
    assert "## Training" in card
    assert "KL to the start" in card


def test_the_card_tells_of_the_making_not_of_the_exporting(tiny: Path, data: Path, done: Path) -> None:
    best = done / "train" / "best"
    words = [f"out={done}", f"export.path={best}", f"export.to={done}/card", "seed=5", "gate.enable=false"]
    pipeline.run_stage("export", load(None, words)[0], Said())
    card = (done / "card" / "README.md").read_text()
    assert f"started from `{tiny}`" in card
    assert '"marker": "#"' in card
    assert '"seed": 5' not in card
    for stage in ("sft", "score", "train", "evaluate"):
        for digest in json.loads((done / stage / "manifest.json").read_text())["inputs"].values():
            assert digest in card
    words = [f"out={done}/elsewhere", f"model.path={tiny}", f"export.path={best}"]
    pipeline.run_stage("export", load(None, words)[0], Said())
    card = (done / "elsewhere" / "export" / "model" / "README.md").read_text()
    assert "Nothing is known of its making." in card
    assert "## Recipe" not in card
    assert "started from" not in card


def test_a_gate_that_passes_lets_the_same_run_export(tiny: Path, data: Path, done: Path) -> None:
    off = ("min_lift_low", "min_prompts", "max_kl", "max_length_ratio", "max_format_drop", "max_repetition")
    words = ("gate.enable=true", *(f"gate.{name}=null" for name in off))
    pipeline.run(small(tiny, data, done, *words), Said())
    gate = json.loads((done / "export" / "model" / "rein_export.json").read_text())["gate"]
    assert gate["passed"]
    assert [line["check"] for line in gate["lines"]] == ["require_no_guard_stop"]
    assert "Passed.\n" in (done / "export" / "model" / "README.md").read_text()


def test_an_evaluation_of_other_weights_is_no_evaluation(tiny: Path, data: Path, done: Path) -> None:
    """The start model is exported by name, and nothing here has judged it."""
    other = ("gate.enable=true", f"export.path={tiny}", f"export.to={done}/other")
    with pytest.raises(GateFailed, match=r"lower end of the lift is not known; run `rein evaluate`"):
        pipeline.run_stage("export", small(tiny, data, done, *other), Said())
    console = Said()
    alone = ("gate.enable=null", "stages=[export]", *other[1:])
    pipeline.run_stage("export", small(tiny, data, done, *alone), console)
    assert any(line.startswith("gate: not asked, nothing here has evaluated") for line in console.lines)
    assert "Not asked: nothing here" in (done / "other" / "README.md").read_text()
