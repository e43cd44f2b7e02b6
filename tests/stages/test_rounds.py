"""Rounds of fresh rollouts in `rein run`: who wrote the rows, what goes on, what a kill leaves."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rein import snapshots
from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data import addition
from rein.data.split import prompt_key
from rein.errors import CheckpointError, ConfigError, GuardStop, Interrupted, RefreshAsked
from rein.journal import read
from rein.models.actor import load_actor
from rein.stages import pipeline, rounds, train_end
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics, untimed

ROLLED = ("rollout", "score")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    addition.write(folder, 0)
    return folder


def small(tiny: Path, data: Path, out: Path, *words: str) -> Recipe:
    """Four batches of rows that a random model wrote, three of them after the first by the actor of then."""
    own = f"""
        out={out} cache={out}-cache model.path={tiny} threads=1 stages=[rollout,score,train]
        data.max_prompt_length=16 data.max_response_length=6 score.reward=length
        rollout.files={data}/prompts.parquet rollout.max_prompts=160 rollout.n=1
        data.train_batch_size=48 actor.ppo_mini_batch_size=24 actor.ppo_epochs=1 trainer.critic_warmup=1
        actor.optim.lr=1e-3 trainer.total_training_steps=4 trainer.refresh_every=1
        trainer.val_prompts=2 trainer.val_before_train=false guards.preset=off
    """.split()
    given = {word.partition("=")[0] for word in words}
    return load(None, [*(w for w in own if w.partition("=")[0] not in given), *words])[0]


def run(recipe: Recipe) -> dict[str, Any]:
    return pipeline.run(recipe, Console(quiet=True))


def rows_of(out: Path, number: int, stage: str = "score") -> list[dict[str, Any]]:
    folder = out if number == 0 else out / f"round-{number}"
    return list(pq.read_table(folder / stage / "trajectories.parquet").to_pylist())


@pytest.fixture(scope="module")
def done(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = small(tiny, data, tmp_path_factory.mktemp("rounds") / "run")
    run(recipe)
    return recipe


def test_each_round_trains_on_rows_of_the_actor_as_it_was_when_the_round_began(done: Recipe) -> None:
    out = Path(done.out)
    assert rounds.current(done).number == 3
    for number in range(4):
        rows = rows_of(out, number)
        assert {row["policy_version"] for row in rows} == {number}
    trained = json.loads((out / "train" / "manifest.json").read_text())
    (behind,) = [name for name in trained["inputs"] if name.endswith("trajectories.parquet")]
    assert Path(behind) == out / "round-3" / "score" / "trajectories.parquet"
    lines = [line for line in read_metrics(out / "train" / "metrics.jsonl") if "kl/behavior" in line]
    assert [line["training/global_step"] for line in lines] == [1, 2, 3, 4]
    assert all(abs(line["kl/behavior"]) < 1e-5 for line in lines), (
        "old and behavior policy are one: on-policy"
    )


def test_the_actor_that_answers_is_the_trained_one_and_is_kept_no_longer_than_needed(done: Recipe) -> None:
    out = Path(done.out)
    kept = [number for number in range(5) if rounds.actor_folder(done, number).exists()]
    assert kept == [3]
    path = str(rounds.actor_folder(done, 3))
    row = rows_of(out, 3, "rollout")[0]
    assert row["behavior_policy"] == path
    moved = load_file(Path(path) / "model.safetensors")
    start = load_file(Path(str(done.model.path)) / "model.safetensors")
    assert any(not torch.equal(moved[name], start[name]) for name in start)


def test_later_rounds_answer_other_prompts_and_none_that_is_held_out(done: Recipe) -> None:
    out = Path(done.out)
    held = pq.read_table(rounds.held_out_file(done)).to_pylist()
    keys = [{prompt_key(np.array(row["prompt_ids"])) for row in rows_of(out, number)} for number in range(3)]
    held_keys = {prompt_key(np.array(row["prompt_ids"])) for row in held}
    assert len(held_keys) == 64
    assert held_keys < keys[0]
    assert not held_keys & (keys[1] | keys[2])
    assert len(keys[1]) == len(keys[2]) == 160
    assert not keys[1] & keys[2]


def test_what_is_done_is_not_done_again(done: Recipe) -> None:
    files = sorted(Path(done.out).rglob("*.parquet")) + sorted(Path(done.out).rglob("*.safetensors"))
    before = {file: file.stat().st_mtime_ns for file in files}
    run(done)
    assert {file: file.stat().st_mtime_ns for file in files} == before


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(Path(recipe.out) / "train" / "last" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("at", [*(f"{stage} of round 2" for stage in ROLLED), "the ask", "an update"])
def test_a_run_that_ends_at_any_moment_goes_on_to_the_same_weights(
    tiny: Path, data: Path, tmp_path: Path, done: Recipe, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    recipe = small(tiny, data, tmp_path / "run")

    class Ended(Exception):
        pass

    with monkeypatch.context() as broken:
        if "round" in at:
            real_stage, stage = pipeline._run_stage, at.partition(" ")[0]

            def run_stage(name: str, some: Recipe, console: Console) -> dict[str, Any]:
                if name == stage and some.out.endswith("round-2"):
                    raise Ended
                return real_stage(name, some, console)

            broken.setattr(pipeline, "_run_stage", run_stage)
        elif at == "the ask":
            real_ask = rounds.ask

            def ask(some: Recipe, wanted: rounds.Round) -> None:
                if wanted.number == 2:
                    raise Ended
                real_ask(some, wanted)

            broken.setattr(train_end.rounds, "ask", ask)
        else:
            from rein.stages.train_job import Job

            real_log = Job.log

            def log(job: Job, metrics: dict[str, float]) -> None:
                real_log(job, metrics)
                if job.round.number == 2 and job.cursor.update == 3:
                    raise Ended

            broken.setattr(Job, "log", log)
        with pytest.raises(Ended):
            run(recipe)
    run(recipe)
    whole, again = weights(done), weights(recipe)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    one, other = (untimed(read_metrics(Path(r.out) / "train" / "metrics.jsonl")) for r in (done, recipe))
    assert one[-1] == other[-1]


@pytest.mark.long
def test_the_newest_versions_are_kept(tiny: Path, data: Path, tmp_path: Path) -> None:
    recipe = small(tiny, data, tmp_path / "run", "trainer.keep_versions=2", "trainer.total_training_steps=3")
    run(recipe)
    files = [Path(file) for file in rounds.training(recipe).data.train_files]
    assert files == [Path(recipe.out) / f"round-{n}" / "score" / "trajectories.parquet" for n in (2, 1)]
    counts = json.loads((Path(recipe.out) / "train" / "manifest.json").read_text())["rows"]
    assert counts["in"] == counts["trained"] == 320


DRIFT = '{name: drift, metric: "actor/lr", above: 0, for: 3, then: refresh}'


def test_a_guard_asks_by_itself_and_the_rest_of_the_batch_is_left(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    words = ("trainer.refresh_every=-1", f"guards.rules=[{DRIFT}]", "actor.ppo_epochs=2")
    recipe = small(tiny, data, tmp_path / "run", *words, "trainer.total_training_steps=2")
    run(recipe)
    now = rounds.current(recipe)
    assert (now.number, now.begin, now.asked, now.batches) == (1, 1, 8, 2)
    assert now.steps == {"actor": 8, "critic": 8}
    steps = [
        line for line in read_metrics(Path(recipe.out) / "train" / "metrics.jsonl") if "actor/lr" in line
    ]
    assert [line["training/global_step"] for line in steps] == [1, 1, 1, 2, 2, 2, 2]
    (verdict,) = [line for line in read(Path(recipe.out) / "train" / "journal.jsonl") if "rule" in line]
    assert verdict["action"] == "refresh"


def always(metrics: dict[str, float]) -> str | None:
    return "refresh" if "actor/lr" in metrics else None


@pytest.mark.long
def test_rules_that_fresh_rows_do_not_quiet_end_the_run(tiny: Path, data: Path, tmp_path: Path) -> None:
    words = ("trainer.refresh_every=-1", "guards.rules=[test_rounds:always]")
    recipe = small(tiny, data, tmp_path / "run", *words, "trainer.total_training_steps=2")
    with pytest.raises(GuardStop, match="the rows were fresh; look at the rule") as caught:
        run(recipe)
    assert not isinstance(caught.value, RefreshAsked)
    assert rounds.current(recipe).number == 1


def test_train_alone_and_stored_scores_end_with_what_to_do(tiny: Path, data: Path, tmp_path: Path) -> None:
    recipe = small(tiny, data, tmp_path / "run")
    for stage in ROLLED:
        pipeline.run_stage(stage, recipe, Console(quiet=True))
    with pytest.raises(RefreshAsked, match="`rein run` makes"):
        pipeline.run_stage("train", recipe, Console(quiet=True))
    assert load_actor(str(rounds.actor_folder(recipe, 1)))
    stored = str(Path(recipe.out) / "score" / "trajectories.parquet")
    words = ("stages=[train]", f"data.train_files={stored}", "trainer.refresh_every=-1")
    alone = small(tiny, data, tmp_path / "stored", *words, "guards.rules=[test_rounds:always]")
    for _ in range(2):  # the second goes on with the rows it has, until the rule asks again
        with pytest.raises(RefreshAsked, match="cannot have them scored"):
            run(alone)
    assert rounds.current(alone).number == 0
    with pytest.raises(RefreshAsked, match="round 1 waits for fresh rollouts"):
        pipeline.run_stage("train", recipe, Console(quiet=True))


@pytest.mark.long
def test_stored_rows_are_round_0_and_each_of_their_prompts_is_answered_once(
    tiny: Path, data: Path, tmp_path: Path, done: Recipe
) -> None:
    stored = str(Path(done.out) / "score" / "trajectories.parquet")
    recipe = small(
        tiny, data, tmp_path / "run", "stages=[train]", f"data.train_files=[{stored},{stored}]",
        "rollout.files=[]", "rollout.max_prompts=null", "trainer.total_training_steps=2",
    )  # fmt: skip
    run(recipe)
    assert len(rows_of(Path(recipe.out), 1)) == 160 - 64


@pytest.mark.long
def test_resume_never_begins_with_round_0_and_other_settings_are_refused(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    recipe = small(tiny, data, tmp_path / "run", "trainer.total_training_steps=2")
    run(recipe)
    first = weights(recipe)
    other = small(tiny, data, tmp_path / "run", "trainer.total_training_steps=2", "actor.optim.lr=2e-3")
    with pytest.raises(CheckpointError, match=r"run with other settings.*resume=never"):
        run(other)
    run(other.model_copy(update={"resume": "never"}))
    assert rounds.current(recipe).number == 1
    assert any(not torch.equal(first[name], now) for name, now in weights(other).items())


@pytest.mark.long
def test_a_remedy_sets_the_temperature_of_the_next_rollouts(tiny: Path, data: Path, tmp_path: Path) -> None:
    rule = '{name: cool, metric: "actor/lr", above: 0, then: [{temperature: 0.5}]}'
    words = (f"guards.rules=[{rule}]", "trainer.total_training_steps=2")
    recipe = small(tiny, data, tmp_path / "run", *words)
    run(recipe)
    assert {row["temperature"] for row in rows_of(Path(recipe.out), 0)} == {1.0}
    assert {row["temperature"] for row in rows_of(Path(recipe.out), 1)} == {0.5}


@pytest.mark.long
def test_lost_snapshots_and_a_broken_round_are_named(tiny: Path, data: Path, tmp_path: Path) -> None:
    recipe = small(tiny, data, tmp_path / "run")
    for stage in ROLLED:
        pipeline.run_stage(stage, recipe, Console(quiet=True))
    with pytest.raises(RefreshAsked):
        pipeline.run_stage("train", recipe, Console(quiet=True))
    folder = Path(recipe.out) / "train"
    snapshots.Snapshots(folder / "snapshots").clear()
    with pytest.raises(CheckpointError, match=r"no snapshot is left.*resume=never"):
        run(recipe)
    (folder / "round.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"round\.json: cannot be read.*resume=never"):
        run(recipe)
    run(recipe.model_copy(update={"resume": "never"}))
    assert rounds.current(recipe).number == 3
    hotter = recipe.rollout.model_copy(update={"top_p": 0.9})
    run(recipe.model_copy(update={"resume": "never", "rollout": hotter}))
    assert {row["top_p"] for number in (0, 3) for row in rows_of(Path(recipe.out), number)} == {0.9}


@pytest.mark.long
def test_ctrl_c_between_updates_of_a_later_round_goes_on(
    tiny: Path, data: Path, tmp_path: Path, done: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rein.stages import train as loop

    recipe, real = small(tiny, data, tmp_path / "run"), loop.leave_if
    calls = 0

    def leave_if(interrupt: Any, job: Any, experience: Any) -> None:
        nonlocal calls
        calls += job.round.number == 1
        if calls == 2:
            interrupt.signal_number = 2
        real(interrupt, job, experience)

    with monkeypatch.context() as broken:
        broken.setattr(loop, "leave_if", leave_if)
        with pytest.raises(Interrupted):
            run(recipe)
    run(recipe)
    whole, again = weights(done), weights(recipe)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_server_keeps_its_weights_so_there_are_no_rounds(tiny: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.refresh_every.*rollout\.engine=hf or vllm"):
        small(
            tiny, data, tmp_path / "run", "rollout.engine=server", "rollout.server.url=http://localhost:1/v1"
        )


def test_every_fresh_answer_is_trained_on_however_often_it_was_given(
    tiny: Path, data: Path, tmp_path: Path
) -> None:
    words = (
        "rollout.n=6",
        "rollout.max_new_tokens=1",
        "trainer.total_training_steps=2",
        "rollout.temperature=0.1",
    )
    recipe = small(tiny, data, tmp_path / "run", *words)
    run(recipe)
    made, counts = rows_of(Path(recipe.out), 1, "rollout"), rounds_counts(recipe, 1)
    assert len({(row["prompt"], tuple(row["response_ids"])) for row in made}) < len(made) == 160 * 6
    assert counts["scored"] == len(made)
    assert json.loads((Path(recipe.out) / "train" / "manifest.json").read_text())["rows"]["trained"] == len(
        made
    )


def rounds_counts(recipe: Recipe, number: int) -> dict[str, int]:
    body = json.loads((Path(recipe.out) / f"round-{number}" / "score" / "manifest.json").read_text())
    found: dict[str, int] = body["rows"]
    return found


@pytest.mark.long
def test_other_rollouts_and_an_older_snapshot_are_refused(tiny: Path, data: Path, tmp_path: Path) -> None:
    recipe = small(tiny, data, tmp_path / "run", "trainer.total_training_steps=2")
    for stage in ROLLED:
        pipeline.run_stage(stage, recipe, Console(quiet=True))
    with pytest.raises(RefreshAsked):
        pipeline.run_stage("train", recipe, Console(quiet=True))
    hotter = small(tiny, data, tmp_path / "run", "trainer.total_training_steps=2", "rollout.top_p=0.9")
    with pytest.raises(CheckpointError, match="other rows, prompts or settings of rollout is in round 1"):
        run(hotter)
    file = Path(recipe.out) / "train" / "round.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"asked": 1}))
    with pytest.raises(CheckpointError, match=r"goes on from update 1; resume=never"):
        run(recipe)


@pytest.mark.long
def test_rows_of_unknown_writers_are_trained_on_in_round_0_alone(
    tiny: Path, data: Path, tmp_path: Path, done: Recipe
) -> None:
    stored = str(Path(done.out) / "score" / "trajectories.parquet")
    words = (
        "stages=[train]",
        f"data.train_files={stored}",
        "data.behavior=unknown",
        "trainer.keep_versions=3",
    )
    recipe = small(tiny, data, tmp_path / "run", *words, "trainer.total_training_steps=2")
    run(recipe)
    files = [Path(file).parents[1].name for file in rounds.training(recipe).data.train_files]
    assert files == ["round-1"]
