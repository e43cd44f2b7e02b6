"""B32 to B34, B40 to B44 and B51: NaN gradients, half-done stops and rollbacks, what a resume forgets."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import (
    BATCH,
    LR,
    Course,
    events,
    guarded,
    logged,
    put_back,
    ran,
    same,
    same_end,
    values,
    weights,
)
from rows_made import random_trajectories
from training_made import learner_of, models, recipe

from rein import cli
from rein.config.load import dump, load
from rein.config.recipe import Recipe
from rein.errors import CheckpointError, ConfigError, DataError, GuardStop
from rein.functional.kl import adaptive_kl_coef
from rein.learner import Learner
from rein.models.tiny import make_tiny
from rein.snapshots import RunState, Snapshots
from rein.stages import train
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.types import Trajectory, Update

WATCHED = {"metric": "actor/lr", "above": 1e9, "then": "rollback"}  # never fires, but points are kept


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0, hidden=32, layers=1)


@pytest.fixture(scope="module")
def broken(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A run that was broken off after its sixth update, in the middle of a batch; none changes it."""
    some = guarded(str(tiny), tmp_path_factory.mktemp("broken"))
    assert Course(some, stop_at=6).run().facts is None
    return some


def copied(some: Recipe, folder: Path) -> Recipe:
    """The same run in a folder of its own."""
    shutil.copytree(some.out, folder / "run")
    rows = shutil.copy(some.data.train_files[0], folder / "run.parquet")
    data = some.data.model_copy(update={"train_files": [str(rows)]})
    return some.model_copy(update={"out": str(folder / "run"), "data": data})


# ---- B32: a NaN gradient walks past clipping


def spoil(course: Course, role: str, value: float, times: set[int]) -> None:
    """One entry of one gradient, a norm's, becomes `value` in these backward passes of a role."""
    passes = [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        if passes[0] not in times:
            return gradient
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    next(p for p in course.job.learner.optimizers[role].parameters if p.dim() == 1).register_hook(hook)


@pytest.mark.parametrize(
    ("role", "number", "value"),
    [("critic", 3, math.nan), ("critic", 3, -math.inf), ("actor", 7, math.nan), ("actor", 7, math.inf)],
)
def test_an_update_with_one_gradient_entry_that_is_no_number_is_left_out(
    role: str, number: int, value: float, tiny: Path, tmp_path: Path
) -> None:
    course = Course(guarded(str(tiny), tmp_path, trainer={"total_epochs": 1}))
    spoil(course, role, value, {3})
    course.run()
    before, after = course.after[number - 1], course.after[number]
    assert same(before["tensors"], after["tensors"])
    assert after["meta"][role]["step"] == before["meta"][role]["step"] + 1  # the schedule goes on
    assert not same(course.after[number + 1]["tensors"], after["tensors"])
    (line,) = events(course.recipe)
    assert (line["number"], line["rule"], line["action"]) == (number, "not_finite", "skip")
    assert line["metric"] == f"{role}/grad_norm"
    (shown,) = logged(course.recipe, "guard/skipped")
    assert (shown["number"], shown["guard/skipped"]) == (number, 1)
    assert course.facts is not None
    assert course.facts["skipped_updates"] == 1
    for name, tensor in course.after[16]["tensors"].items():
        assert bool(tensor.isfinite().all()), name


def test_a_loss_that_is_no_number_is_left_out_too(tiny: Path, tmp_path: Path) -> None:
    rows = random_trajectories(14)
    rows[5] = rows[5].with_score(-3e38)
    some = guarded(str(tiny), tmp_path, rows=rows, trainer={"total_epochs": 1})
    facts = ran(some)
    assert 0 < facts["skipped_updates"] < 16
    assert {line["action"] for line in events(some)} == {"skip"}
    for model in ("last", "critic"):
        assert all(bool(tensor.isfinite().all()) for tensor in weights(some, model).values())


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_too_many_in_a_row_end_the_run_and_no_state_of_theirs_is_good(
    role: str, tiny: Path, tmp_path: Path
) -> None:
    guards = {"max_skips": 3, "snapshot_every": 1, "confirm_steps": 1}
    course = Course(guarded(str(tiny), tmp_path, rules=[WATCHED], guards=guards))
    spoil(course, role, math.nan, {1, 3, 4, 5})
    with pytest.raises(GuardStop, match=rf"{role}/grad_norm is nan, 3 updates in a row; lower the learning"):
        course.run()
    lines = events(course.recipe)
    assert [line["action"] for line in lines if line["kind"] == "verdict"] == ["skip"] * 3 + ["stop"]
    state, _ = course.job.snapshots.newest()
    assert state is not None
    assert all(
        bool(tensor.isfinite().all()) for tensor in state.tensors.values() if tensor.is_floating_point()
    )


def test_weights_that_are_no_numbers_are_never_confirmed_good(tiny: Path, tmp_path: Path) -> None:
    """Without a rule on them: a probe that reads NaN is no healthy probe."""

    def poison(job: Job) -> None:
        if job.cursor.number == 5:
            with torch.no_grad():
                job.learner.optimizers["actor"].parameters[0].view(-1)[0] = math.nan

    guards = {"snapshot_every": 1, "confirm_steps": 1, "max_skips": 99}
    some = guarded(str(tiny), tmp_path, rules=[WATCHED], guards=guards)
    course = Course(some, also=poison)
    with pytest.raises(DataError, match="log-prob that is not finite"):
        course.run()
    assert logged(some, "probe/kl_reference")[-1]["probe/kl_reference"] is None  # read, and no number
    assert course.job.reins.good == 0
    assert course.job.reins.pending


# ---- B33: early stop and ratio skip half-done


@pytest.mark.parametrize(
    ("metric", "limit", "then"),
    [
        ("actor/ratio_mean", {"below": 0.5}, "stop_epochs"),
        ("actor/ppo_kl", {"above": 0.2}, "skip"),
        ("actor/pg_clipfrac", {"above": 0.5}, "stop_epochs"),
    ],
)
def test_a_mini_batch_that_went_too_far_leaves_no_gradient_behind(
    metric: str, limit: dict[str, float], then: str, tiny: Path, tmp_path: Path
) -> None:
    """Steps of ten times the size: after a few, the ratio is far from 1."""
    more = {"actor": {"optim": {"lr": 0.1}}, "trainer": {"total_epochs": 1}}
    rule = {"metric": metric, "then": then} | limit
    some = guarded(str(tiny), tmp_path, rules=[rule], **more)  # type: ignore[arg-type]
    pending: list[bool] = []

    def look(job: Job) -> None:
        pending.append(any(p.grad is not None for o in job.learner.optimizers.values() for p in o.parameters))

    course = Course(some, also=look).run()
    fired = [line["number"] for line in events(some)]
    assert fired
    assert not any(pending)
    for number in fired:
        before, after = (course.after[n]["tensors"] for n in (number - 1, number))
        assert same(before, after)
        batch_ends = -(-number // BATCH) * BATCH
        if then == "stop_epochs":
            assert same(after, course.after[batch_ends]["tensors"])  # the actor's come last in a batch
            assert not logged_between(some, number, batch_ends, "actor/lr")
    assert course.job.learner.optimizers["actor"].step == 8
    shapes = [set(line) - {f"guard/{metric}", "guard/skipped"} for line in logged(some, "actor/lr")]
    assert all(shape == shapes[0] for shape in shapes)
    assert len(logged(some, "critic/lr")) == 8  # the critic's updates are none of the rule's business
    reason = events(some)[0]["reason"]
    assert reason.startswith(f"{metric} ")
    ((side, number),) = limit.items()
    assert reason.endswith(f" is {side} {number:g}")


def logged_between(some: Recipe, after: int, to: int, name: str) -> list[Any]:
    return [line for line in logged(some, name) if after < line["number"] <= to]


# ---- B34: a rollback that is not whole


TRIP = {"metric": "critic/vf_loss", "above": 1000, "rest": 0}


def tripping() -> list[Trajectory]:
    rows = random_trajectories(14)
    rows[5] = rows[5].with_score(1e5)
    return rows


@pytest.mark.parametrize(
    ("remedies", "rollbacks", "ends"),
    [
        ([], 3, False),
        ([{"exclude_rows": True}], 1, True),
        ([{"reward_clip": [-1, 1]}], 1, True),
    ],
    ids=["none", "exclude_rows", "reward_clip"],
)
def test_rows_that_always_trip_are_left_out_or_end_the_run_and_nothing_is_silent(
    remedies: list[Any], rollbacks: int, ends: bool, tiny: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    some = guarded(
        str(tiny), tmp_path, rows=tripping(), rules=[TRIP | {"then": ["rollback", *remedies]}],
        guards={"max_rollbacks": 2},
    )  # fmt: skip
    dump(some, tmp_path / "recipe.json")
    assert cli.main(["train", str(tmp_path / "recipe.json")]) == (0 if ends else 4)
    said = capsys.readouterr()
    assert len(events(some, "rollback")) == rollbacks
    assert said.out.count("rollback: back to update") == rollbacks
    for line in events(some, "verdict"):
        assert line["action"] == "rollback"
        assert line["reason"].startswith("critic/vf_loss ")
        assert line["reason"] in said.out
    if not ends:
        assert "guards.max_rollbacks is 2: paused" in said.err
        assert not (Path(some.out) / "train" / "manifest.json").exists()
    assert (len(said.err.splitlines()) == 1) != ends


def test_every_part_comes_from_one_point_and_the_point_is_never_rotated_away(
    tiny: Path, tmp_path: Path
) -> None:
    """Snapshots at every update and the two newest kept: the target is far behind, and whole."""
    schedule = {"optim": {"lr": LR, "lr_scheduler_type": "cosine"}}
    rule = {"metric": "actor/kl_coef", "above": 0, "for": 10, "then": ["rollback", {"kl_coef_at": 0}]}
    some = guarded(
        str(tiny), tmp_path, rules=[rule], actor=schedule, critic=schedule,
        guards={"snapshot_every": 1, "confirm_steps": 14, "max_rollbacks": 9},
        algorithm={"kl_ctrl": {"type": "adaptive", "target_kl": 1e-3, "horizon": 20}},
        trainer={"total_epochs": 2, "save_freq": 1},
    )  # fmt: skip
    course = Course(some, stop_at_rollback=1).run()
    (back,) = events(some, "rollback")
    assert back["from"] - back["to"] > 14
    assert put_back(course.rollbacks[0], course.after[back["to"]]) == []
    numbers = [line["number"] for line in logged(some)]
    assert numbers == sorted(numbers)  # the replayed try has lines of its own


# ---- B40: the rate jumps at a resume


@pytest.mark.parametrize(("schedule", "stop_at"), [("constant", 2), ("cosine", 6), ("wsd", 12)])
def test_rates_after_a_resume_are_those_of_the_straight_run(
    schedule: str, stop_at: int, tiny: Path, tmp_path: Path
) -> None:
    optim = {"optim": {"lr": LR, "lr_scheduler_type": schedule, "lr_warmup_steps": 3, "min_lr_ratio": 0.1}}
    more: dict[str, Any] = {"actor": optim, "critic": optim | {"fit_until": 1.0}}
    more["trainer"] = {"critic_warmup": 4, "total_epochs": 1}
    straight, broken = (guarded(str(tiny), tmp_path, out, **more) for out in ("straight", "broken"))
    ran(straight)
    assert Course(broken, stop_at=stop_at).run().facts is None
    ran(broken)
    for role, count in (("critic", 4 + 8), ("actor", 8)):
        rates = values(straight, f"{role}/lr")
        assert values(broken, f"{role}/lr") == rates
        assert len(rates) == count
        assert rates[:2] == pytest.approx([LR / 3, 2 * LR / 3])
        assert rates[-1] == pytest.approx(LR if schedule == "constant" else LR / 10)
    assert same_end(straight, broken)


def test_another_number_of_steps_at_a_resume_is_refused(broken: Recipe, tmp_path: Path) -> None:
    dump(copied(broken, tmp_path), tmp_path / "recipe.json")
    for word in ("trainer.total_epochs=3", "trainer.critic_warmup=2", "actor.ppo_epochs=3"):
        other, _ = load(tmp_path / "recipe.json", [word])
        with pytest.raises(
            CheckpointError, match="an unfinished run with other settings; use the same recipe"
        ):
            ran(other)


# ---- B41: the adaptive KL coefficient is forgotten, or ill-set


def test_the_coefficient_moves_as_published_and_is_saved_and_restored(tiny_lm: str) -> None:
    assert adaptive_kl_coef(0.1, 12.0, rows=256, target_kl=6.0, horizon=10000) == pytest.approx(0.100512)
    control = {"type": "adaptive", "target_kl": 6.0, "horizon": 10000}
    some, (actor, critic) = recipe(algorithm={"kl_ctrl": control}), models(tiny_lm)
    learner = learner_of(some, actor, critic, kl=0.1)
    learner.control_kl(12.0, 256, 0.1)
    other: Learner = learner_of(some, *models(tiny_lm), kl=0.1)
    tensors, meta = learner.state()
    other.restore(tensors, json.loads(json.dumps(meta)))
    assert other.kl_coef_in_loss == other.kl_coef_in_reward == learner.kl_coef_in_loss
    assert other.kl_coef_in_loss == pytest.approx(0.100512)


@pytest.mark.parametrize("key", ["target_kl", "horizon"])
@pytest.mark.parametrize("value", ["0", "-1", ".nan", ".inf"])
def test_a_target_or_horizon_that_is_none_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.kl_ctrl.{key}"):
        load(None, ["algorithm.kl_ctrl.type=adaptive", f"algorithm.kl_ctrl.{key}={value}"])


SCHEDULE = [[0, 0.08], [0.2, 0.05], [0.6, 0.02]]


@pytest.mark.parametrize(
    ("control", "in_reward"),
    [
        ({"type": "adaptive", "target_kl": 0.01, "horizon": 20}, False),
        ({"type": "moving_average", "target_kl": 0.01, "horizon": 20}, True),
        ({"type": "schedule", "schedule": SCHEDULE}, False),
    ],
    ids=["adaptive in the loss", "moving_average in the reward", "schedule in the loss"],
)
def test_the_logged_coefficient_after_a_resume_is_that_of_the_straight_run(
    control: dict[str, Any], in_reward: bool, tiny: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {
        "algorithm": {"kl_ctrl": control | {"kl_coef": None if "schedule" in control else 0.05}},
        "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 1},
    }
    name = "actor/kl_coef"
    if in_reward:
        more["algorithm"] |= {"use_kl_in_reward": True}
        more["actor"] |= {"use_kl_loss": False}
        name = "actor/reward_kl_penalty_coeff"
    straight, broken = (guarded(str(tiny), tmp_path, out, **more) for out in ("straight", "broken"))
    ran(straight)
    assert Course(broken, stop_at=5).run().facts is None
    ran(broken)
    coefs = values(straight, name)
    assert len(set(coefs)) > 2
    assert values(broken, name) == coefs


# ---- B42: the reference moves at a resume


@pytest.mark.parametrize(
    ("kind", "lora", "cached"),
    [(None, 0, True), ("full", 0, False), ("full", 2, True), (None, 2, False)],
    ids=["stored", "copy", "adapters off", "stored, cache removed"],
)
def test_the_first_kl_after_a_resume_is_the_last_before_it(
    kind: str | None, lora: int, cached: bool, tiny: Path, tmp_path: Path
) -> None:
    """Were the reference made from what is restored, the KL would begin at 0 again."""
    more: dict[str, Any] = {
        "actor": {"kl_loss_type": kind, "optim": {"lr": 0.05}},
        "model": {"lora_rank": lora},
    }
    some = guarded(str(tiny), tmp_path, **more)
    course = Course(some, stop_at=7)
    before = course.run().job
    if not cached:
        shutil.rmtree(tmp_path / "cache")
    after = open_job(some, Console(quiet=True))
    after.close()
    assert after.probe.measure() == before.probe.measure()
    assert after.probe.measure()["probe/kl_reference"] > 0.01
    one, other = before.maker.references, after.maker.references
    assert one is not None
    assert other is not None
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.tensor(one[key]), torch.tensor(other[key])) for key in one)
    losses, course.interrupt.signal_number = [], 0
    for job in (before, after):
        experience = job.maker.make(job.rows_of(1), 0.0)
        losses.append(job.learner.backward(Update("actor", (0, 1), 0), experience)["actor/kl_loss"])
    assert losses[0] == losses[1] > 0


def test_a_start_policy_that_was_changed_between_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    some = guarded(str(model), tmp_path)
    assert Course(some, stop_at=6).run().facts is None
    make_tiny(model, seed=1, hidden=32, layers=1)
    with pytest.raises(CheckpointError, match="an unfinished run with other settings"):
        ran(some)


# ---- B43: critic, optimizer or value head are not restored


@pytest.mark.parametrize(
    ("stop_at", "lora"),
    [(2, 0), (5, 0), (10, 2)],
    ids=["in the fit", "in the critic's", "in the actor's, adapters"],
)
def test_every_part_is_bit_equal_after_a_resume(stop_at: int, lora: int, tiny: Path, tmp_path: Path) -> None:
    """The model is tied; the critic's head is new, and random weights make it say something."""
    more: dict[str, Any] = {"trainer": {"critic_warmup": 3, "total_epochs": 1}, "critic": {"fit_until": 1.0}}
    some = guarded(str(tiny), tmp_path, model={"lora_rank": lora}, **more)
    course = Course(some, stop_at=stop_at).run()
    job = open_job(some, Console(quiet=True))
    job.close()
    tensors, meta = job.learner.state()
    assert same(tensors, course.after[stop_at]["tensors"])
    assert meta == course.after[stop_at]["meta"]
    names = {name.partition("/")[0] + "/" + name.split("/")[1] for name in tensors}
    moments = {f"critic/{part}" for part in ("weight", "exp_avg", "exp_avg_sq", "step")}
    assert moments <= names
    assert bool(tensors["critic/weight/score.weight"].any())
    assert course.job.critic is not None
    assert job.critic is not None
    rows = job.train_rows
    with torch.no_grad():
        assert torch.equal(job.critic.values(rows), course.job.critic.values(rows))


def prefixed(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("critic/weight/")]:
        tensors[name.replace("critic/weight/", "critic/weight/module.")] = tensors.pop(name)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "head": ("critic/weight/score.weight is missing", lambda t: t.pop("critic/weight/score.weight")),
    "critic": ("critic/weight/.* is missing", lambda t: [t.pop(n) for n in [*t] if n.startswith("critic/")]),
    "moments": (
        "(actor|critic)/exp_avg_sq/.* is missing",
        lambda t: [t.pop(n) for n in [*t] if "exp_avg_sq" in n],
    ),
    "steps": ("step/.* is missing", lambda t: [t.pop(n) for n in [*t] if "/step/" in n]),
    "names": ("critic/weight/.* is missing", prefixed),
    "experience": ("experience/values is missing", lambda t: t.pop("experience/values")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_part_that_is_missing_is_an_error_and_never_a_fresh_start(
    what: str, broken: Recipe, tmp_path: Path
) -> None:
    some = copied(broken, tmp_path)
    ring = Snapshots(Path(some.out) / "train" / "snapshots")
    state = ring.load(6)
    said, damage = DAMAGE[what]
    damage(state.tensors)
    ring.save(6, RunState(state.tensors, state.meta))
    with pytest.raises(CheckpointError, match=f"snapshot: .*{said}.*; resume from another snapshot"):
        ran(some)


# ---- B44: a resume with other data or settings


CHANGES: dict[str, Callable[[Recipe, Path], Recipe]] = {
    "another file": lambda some, folder: with_rows(some, random_trajectories(14, seed=9)),
    "fewer rows": lambda some, folder: with_rows(some, random_trajectories(12)),
    "other scores": lambda some, folder: with_rows(
        some, [r.with_score(0.5) for r in random_trajectories(14)]
    ),
    "batch size": lambda some, folder: some.model_copy(
        update={"data": some.data.model_copy(update={"train_batch_size": 3})}
    ),
    "seed": lambda some, folder: some.model_copy(update={"seed": 5}),
}


def with_rows(some: Recipe, rows: list[Trajectory]) -> Recipe:
    """The file that the recipe names, with other rows."""
    path, folder = str(some.model.path), Path(some.data.train_files[0]).parent
    guarded(path, folder, Path(some.out).name, rows=rows)
    return some


@pytest.mark.parametrize("what", CHANGES)
def test_an_unfinished_run_is_never_gone_on_with_on_other_rows_or_settings(
    what: str, broken: Recipe, tmp_path: Path
) -> None:
    some = copied(broken, tmp_path)
    ring = Snapshots(Path(some.out) / "train" / "snapshots")
    numbers = ring.numbers()
    other = CHANGES[what](some, tmp_path)
    kind = "rows|settings" if "row" in what or "file" in what or "score" in what else "settings"
    with pytest.raises(
        CheckpointError, match=f"an unfinished run with other ({kind}); use the same recipe and"
    ):
        ran(other)
    assert ring.numbers() == numbers  # its work is not thrown away


@pytest.mark.parametrize("what", ["fewer rows"])
def test_after_a_finished_run_other_rows_or_settings_begin_at_the_first_update(
    what: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = {"metric": "actor/lr", "above": 0, "for": 3, "rest": 99}
    some = guarded(str(tiny), tmp_path, rules=[rule], trainer={"total_epochs": 1})
    ran(some)
    other = CHANGES[what](some, tmp_path)
    facts = train.run(other, Console())
    assert "starting anew" in capsys.readouterr().out
    assert values(other, "training/global_step")[0] == 1
    assert facts["updates"] == max(line["number"] for line in logged(other))
    assert [line["seq"] for line in events(other)] == [1]  # of the run before nothing stands in the journal
    fresh = other.model_copy(update={"out": str(tmp_path / "fresh")})
    ran(fresh)
    assert same_end(other, fresh)


# ---- B51: adapters start afresh at a resume


@pytest.mark.parametrize(("rank", "stop_at"), [(1, 5), (4, 9)])
def test_adapters_broken_off_and_gone_on_with_are_those_of_the_straight_run(
    stop_at: int, rank: int, tiny: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"model": {"lora_rank": rank}, "trainer": {"total_epochs": 1}}
    straight, broken = (guarded(str(tiny), tmp_path, out, **more) for out in ("straight", "broken"))
    whole = Course(straight).run()
    assert Course(broken, stop_at=stop_at).run().facts is None
    rest = Course(broken)
    restored = {name for name, _ in rest.job.learner.optimizers["actor"].named}
    assert restored == {name for name, _ in whole.job.learner.optimizers["actor"].named}
    assert all(name.count(".lora_") == 1 for name in restored)  # wrapped once
    rest.run()
    last = max(whole.after)
    assert same(rest.after[last]["tensors"], whole.after[last]["tensors"])
    assert rest.after[last]["meta"] == whole.after[last]["meta"]
    assert logged(broken) == logged(straight)
    losses = values(broken, "actor/loss")
    assert losses[max(stop_at - 4, 0)] != losses[0] or stop_at < 5
    assert same_end(straight, broken)
