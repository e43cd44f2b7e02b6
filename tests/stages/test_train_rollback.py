"""A rollback puts back the run state bit for bit, less what it must not undo; a resume changes nothing."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import (
    BATCH,
    HALVE_AT_3,
    LR,
    Course,
    batch_end,
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

from rein import cli
from rein.config.load import dump
from rein.errors import GuardStop
from rein.journal import read, standing
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.types import Softening, Trajectory

pytestmark = pytest.mark.long

POINTS = {"snapshot_every": 3, "confirm_steps": 1}


def at(reading: int, *then: Any, **more: Any) -> dict[str, Any]:
    """Fires at that reading of the actor's full rate; never again once it is halved."""
    return HALVE_AT_3 | {"for": reading, "then": list(then), "name": "test"} | more


BACK = ("rollback", {"lr": 0.5})


# what is put back


@pytest.mark.parametrize(("reading", "to"), [(2, 0), (6, 6), (9, 15)], ids=["start", "mid-batch", "later"])
def test_everything_that_updates_move_is_put_back_bit_for_bit(
    reading: int, to: int, tiny: Path, tmp_path: Path
) -> None:
    schedule = {"lr": LR, "lr_scheduler_type": "wsd"}
    mix = {"share": 0.4, "coef": 0.5, "files": [str(tmp_path / "run.parquet")]}
    some = guarded(
        str(tiny), tmp_path, rules=[at(reading, *BACK)], guards=POINTS, sft=mix,
        actor={"optim": schedule}, critic={"optim": schedule},
        algorithm={"kl_ctrl": {"type": "moving_average", "target_kl": 0.001, "horizon": 10}},
    )  # fmt: skip
    course = Course(some).run()
    (back,) = events(some, "rollback")
    target, found = course.after[to], course.rollbacks[0]
    assert (back["to"], back["from"]) == (to, found["number"])
    assert put_back(found, target) == []
    left = course.after[back["from"]]
    assert put_back(left, target)  # it had been another state
    assert all(torch.equal(seen["generator"], target["generator"]) for seen in course.after.values())
    moved = {name for name in target["meta"] if left["meta"][name] != target["meta"][name]}
    assert "actor" in moved
    if to >= BATCH:
        assert moved >= {"critic", "kl_coef_in_loss", "kl_average", "demonstrations"}


def test_a_target_in_the_middle_of_a_batch_brings_its_experience_back(tiny: Path, tmp_path: Path) -> None:
    some = guarded(
        str(tiny), tmp_path, rules=[at(6, *BACK)], guards=POINTS, model={"lora_rank": 2},
        algorithm={"use_kl_in_reward": True, "insist": True},
    )  # fmt: skip
    kept: dict[str, torch.Tensor] = {}

    def look(job: Job) -> None:
        if job.cursor.number == 7:
            tensors = job.snapshots.load(6).tensors
            kept.update({name: tensors[name] for name in tensors if name.startswith("experience/")})

    course = Course(some, also=look).run()
    experience = course.rollbacks[0]["experience"]
    assert len(kept) >= 9
    for name, tensor in kept.items():
        assert torch.equal(getattr(experience, name.partition("/")[2]), tensor), name
    assert [row.where for row in experience.rows] == [row.where for row in course.job.rows_of(0)]


def test_a_batch_stored_before_its_rewards_were_clipped_is_made_anew(tiny: Path, tmp_path: Path) -> None:
    some = guarded(str(tiny), tmp_path, rules=[at(6, *BACK, {"reward_clip": [0, 0.5]})], guards=POINTS)
    course = Course(some).run()
    (back,) = events(some, "rollback")
    assert back["to"] == 6
    assert course.rollbacks[0]["cursor"][2] == 6
    assert course.rollbacks[0]["experience"] is None
    made = [(line["number"], line["critic/rewards/max"]) for line in logged(some, "critic/rewards/max")]
    assert [reward for number, reward in made if number <= back["from"]] == [1, 1]
    assert (back["from"] + 1, 0.5) in made
    assert max(reward for number, reward in made if number > back["from"]) == 0.5


def test_number_journal_remedies_and_left_out_rows_are_not_undone(tiny: Path, tmp_path: Path) -> None:
    some = guarded(
        str(tiny), tmp_path, guards=POINTS,
        rules=[at(6, *BACK, {"kl_coef": 2}, {"grad_clip": 0.25}, {"exclude_rows": True})],
    )  # fmt: skip
    course = Course(some).run()
    found = course.rollbacks[0]
    assert found["number"] == 14
    assert found["soft"] == Softening(lr=0.5, kl_coef=2.0, grad_clip=0.25)
    verdict, back = events(some)
    assert (verdict["kind"], verdict["number"], verdict["rule"]) == ("verdict", 14, "test")
    assert verdict["changed"] == {"lr": [1.0, 0.5], "kl_coef": [1.0, 2.0], "grad_clip": [None, 0.25]}
    assert set(verdict["excluded"]) == found["excluded"]
    assert len(found["excluded"]) == 1  # of three rows, the last mini-batch has one
    assert (back["kind"], back["from"], back["to"]) == ("rollback", 14, 6)
    numbers = [line["number"] for line in logged(some)]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(14 + 1 + 26))  # none twice but where probes are logged beside
    assert {line["actor/lr"] for line in logged(some, "actor/lr") if line["number"] <= 14} == {LR}
    assert {line["actor/lr"] for line in logged(some, "actor/lr") if line["number"] > 14} == {LR / 2}
    assert {line["actor/kl_coef"] for line in logged(some, "actor/kl_coef") if line["number"] > 14} == {0.1}
    assert course.facts is not None
    assert (course.facts["rollbacks"], course.facts["updates"]) == (1, 40)


def test_a_second_rollback_does_not_forget_the_first(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    module = own(
        """
        from rein.types import Verdict

        class Twice:  # without a state: a rollback does not set its count back
            def __init__(self):
                self.calls = 0

            def __call__(self, metrics):
                self.calls += "actor/loss" in metrics
                if self.calls in (6, 9) and "actor/loss" in metrics:
                    found = {"lr": 0.5, "critic_lr": 0.25, "kl_coef": 1.5, "exclude_rows": True}
                    return Verdict("rollback", "as told", remedies=found)
        """
    )
    some = guarded(str(tiny), tmp_path, rules=[f"{module}:Twice"], guards=POINTS)
    course = Course(some).run()
    first, second = course.rollbacks
    assert first["soft"] == Softening(lr=0.5, critic_lr=0.25, kl_coef=1.5)
    assert second["soft"] == Softening(lr=0.25, critic_lr=0.0625, kl_coef=2.25)
    assert first["excluded"] < second["excluded"] or len(second["excluded"]) == 4
    assert set(values(some, "actor/lr")[-4:]) == {LR / 4}
    assert set(values(some, "critic/lr")[-4:]) == {LR / 16}
    assert values(some, "actor/kl_coef")[-1] == 0.05 * 2.25
    assert [line["from"] for line in events(some, "rollback")] == [first["number"], second["number"]]


def test_the_target_outlives_rotation_and_the_state_after_a_rollback_is_the_newest(
    tiny: Path, tmp_path: Path
) -> None:
    """Two snapshots are kept; the good one is older than many. And it is confirmed however often is saved."""
    guards = {"snapshot_every": 1, "confirm_steps": 12}
    trainer = {"save_freq": 1, "total_epochs": 3}
    some = guarded(str(tiny), tmp_path, rules=[at(19, *BACK)], guards=guards, trainer=trainer)
    course = Course(some, stop_at_rollback=1).run()
    (back,) = events(some, "rollback")
    assert (back["from"], back["to"]) == (39, 15)
    assert put_back(course.rollbacks[0], course.after[15]) == []
    state, passed_over = course.job.snapshots.newest()
    assert passed_over == []
    assert state is not None
    assert state.meta["cursor"]["number"] == 40  # broken off one update later
    assert state.meta["reins"]["good"] == 39
    assert 39 in course.job.snapshots.numbers()
    assert len(course.job.snapshots.numbers()) <= 5


def test_rollback_points_come_where_batches_are_shorter_than_their_distance(
    tiny: Path, tmp_path: Path
) -> None:
    some = guarded(
        str(tiny), tmp_path, rules=[at(6, *BACK)], guards={"snapshot_every": 4, "confirm_steps": 2},
        actor={"ppo_mini_batch_size": 4, "ppo_epochs": 1}, trainer={"total_epochs": 4},
    )  # fmt: skip
    course = Course(some).run()
    (back,) = events(some, "rollback")
    assert (back["from"], back["to"]) == (12, 8)  # two updates a batch: a point after every second batch
    assert put_back(course.rollbacks[0], batch_end(course.after[8])) == []


def test_without_held_out_rows_nothing_is_confirmed_and_the_start_is_the_target(
    tiny: Path, tmp_path: Path
) -> None:
    data = {"train_batch_size": 4, "holdout_fraction": 0, "train_files": [str(tmp_path / "run.parquet")]}
    some = guarded(str(tiny), tmp_path, rules=[at(6, *BACK)], guards=POINTS, data=data)
    course = Course(some).run()
    assert [line["to"] for line in events(some, "rollback")] == [0]
    assert put_back(course.rollbacks[0], course.after[0]) == []


def test_a_rollback_in_the_critic_s_fit_begins_the_fit_again(tiny: Path, tmp_path: Path) -> None:
    rule = {"metric": "critic/lr", "above": 0.6 * LR, "for": 4, "then": ["rollback", {"critic_lr": 0.5}]}
    some = guarded(
        str(tiny), tmp_path, rules=[rule], trainer={"critic_warmup": 6, "total_epochs": 1},
        critic={"fit_until": 1.0, "optim": {"lr": LR}},
    )  # fmt: skip
    course = Course(some).run()
    (back,) = events(some, "rollback")
    assert (back["from"], back["to"]) == (4, 0)
    assert put_back(course.rollbacks[0], course.after[0]) == []
    rates = values(some, "critic/lr")
    assert rates[:4] == [LR] * 4
    assert rates[4:] == [LR / 2] * (6 + 2 * 4)
    assert course.job.cursor.fitted == 6
    assert course.job.learner.optimizers["critic"].step == 6 + 2 * 4


def test_nothing_goes_behind_the_moment_the_actor_starts(tiny: Path, tmp_path: Path) -> None:
    some = guarded(str(tiny), tmp_path, rules=[at(1, *BACK)], trainer={"critic_warmup": 3})
    course = Course(some).run()
    assert [line["to"] for line in events(some, "rollback")] == [3]
    assert put_back(course.rollbacks[0], course.after[3]) == []


# rows that are left out


def huge(value: float) -> list[Trajectory]:
    """Every row scores 0 or 1, one of those that train this."""
    rows = random_trajectories(14)
    rows[5] = rows[5].with_score(value)
    return rows


SPIKE = {"metric": "critic/vf_loss", "above": 1000, "rest": 0, "then": ["rollback", {"exclude_rows": True}]}


@pytest.mark.parametrize("size", [2, 4], ids=["mini-batch", "whole batch"])
def test_rows_that_a_rollback_leaves_out_count_no_more(size: int, tiny: Path, tmp_path: Path) -> None:
    """Whatever they score, the run after it is the same: they are in no loss, no mean, no whitening."""
    runs, courses = [], []
    for score in (1e4, 1e5):
        some = guarded(
            str(tiny), tmp_path, f"run{score:g}", rows=huge(score), rules=[SPIKE],
            actor={"ppo_mini_batch_size": size},
        )  # fmt: skip
        runs.append(some)
        courses.append(Course(some).run())
    assert [len(events(some, "rollback")) for some in runs] == [1, 1]
    one, other = (events(some, "verdict")[0]["excluded"] for some in runs)
    assert one == other
    assert len(one) == min(size, 3)  # the batch of three
    wheres = {row.where.partition(" ")[2] for row in courses[0].job.train_rows if row.key in one}
    assert "row 5" in wheres
    assert same_end(*runs)
    assert max(values(runs[0], "critic/vf_loss")[-4:]) < 10


def test_copies_of_a_row_that_is_left_out_are_left_out_too(tiny: Path, tmp_path: Path) -> None:
    rows = random_trajectories(14)
    rows = [*rows, *rows]
    some = guarded(str(tiny), tmp_path, rows=rows, rules=[at(1, *BACK, {"exclude_rows": True})])
    course = Course(some).run()
    (verdict,) = events(some, "verdict")
    left = [
        row.where
        for batch in range(course.job.per_epoch)
        for row in course.job.rows_of(batch)
        if not row.response_mask.any()
    ]
    keys = {row.where: row.key for row in course.job.train_rows}
    assert {keys[where] for where in left} == set(verdict["excluded"])
    assert len(left) == 2 * len(verdict["excluded"])


def test_rows_left_out_count_no_more_in_the_critic_s_fit(tiny: Path, tmp_path: Path) -> None:
    some = guarded(
        str(tiny), tmp_path, rows=huge(1e4), rules=[SPIKE], trainer={"critic_warmup": 8, "total_epochs": 1},
        critic={"fit_until": 1.0},
    )  # fmt: skip
    facts = ran(some)
    assert facts["rollbacks"] == 1
    assert max(values(some, "critic/vf_loss")[-10:]) < 10


def test_a_mini_batch_of_which_nothing_counts_moves_nothing_and_its_schedule_goes_on(
    tiny: Path, tmp_path: Path
) -> None:
    course = Course(guarded(str(tiny), tmp_path, rules=[at(1, *BACK, {"exclude_rows": True})]))
    course.run()
    plan = course.job.updates_of(course.job.rows_of(0), 0)
    rows, first = course.job.rows_of(0), course.rollbacks[0]["number"]
    empty = [update for update in plan if not any(rows[i].response_mask.any() for i in update.rows)]
    assert {update.role for update in empty} >= {"actor"}
    for update in empty:
        before, after = (course.after[n] for n in (first + update.number, first + update.number + 1))
        assert same(before["tensors"], after["tensors"])
        assert after["meta"][update.role]["step"] == before["meta"][update.role]["step"] + 1


# too many


def trouble(folder: Path, own: Callable[[str], str], say: str, having: str = "actor/loss") -> str:
    """A rule that fires as long as a file is there."""
    (folder / "trouble").write_text("")
    return own(
        f"""
        from pathlib import Path

        def rule(metrics):
            if {having!r} in metrics and Path({str(folder / "trouble")!r}).exists():
                return {say!r}
        """
    )


def test_one_rollback_too_many_pauses_with_the_good_state_saved_and_the_same_command_goes_on(
    tiny: Path, tmp_path: Path, own: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = trouble(tmp_path, own, "rollback")
    some = guarded(str(tiny), tmp_path, rules=[f"{module}:rule"], guards={"max_rollbacks": 2})
    dump(some, tmp_path / "recipe.json")
    assert cli.main(["train", str(tmp_path / "recipe.json")]) == 4
    err = capsys.readouterr().err
    assert f"error: train: {module}:rule says rollback; rollback 3, guards.max_rollbacks is 2: paused" in err
    assert "read journal.jsonl, then go on with the same command" in err
    folder = Path(some.out) / "train"
    assert str(folder / "snapshots") in err
    assert not (folder / "manifest.json").exists()
    assert len(events(some, "rollback")) == 3
    job = open_job(some, Console(quiet=True))
    job.close()
    assert (job.cursor.done, job.cursor.number) == (0, 15)
    saved = weights(some)
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values())
    for name, parameter in job.actor.model.named_parameters():
        assert name not in saved or torch.equal(saved[name], parameter)
    (tmp_path / "trouble").unlink()
    assert cli.main(["train", str(tmp_path / "recipe.json")]) == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["facts"]["updates"] == 15 + 32
    assert "resume: from update 0 of 32" in capsys.readouterr().out


def test_none_allowed_pauses_at_the_first(tiny: Path, tmp_path: Path) -> None:
    some = guarded(str(tiny), tmp_path, rules=[at(3, *BACK)], guards={"max_rollbacks": 0})
    with pytest.raises(GuardStop, match=r"rollback 1, guards.max_rollbacks is 0: paused"):
        ran(some)
    ran(some)  # who goes on has looked
    assert values(some, "actor/lr")[-1] == LR / 2


# to the best


SCRIPT = """
    SCORES = {scores}
    asked = 0

    def score(data_source, solution_str, ground_truth, extra_info):
        global asked
        asked += 1
        return SCORES[min(asked, len(SCORES)) - 1]
"""
FALLS = {"metric": "val/score", "falls": 0.2, "against": "best", "then": ["rollback_to_best", {"lr": 0.5}]}


def test_rollback_to_best_goes_to_the_best_by_held_out_score(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    module = own(SCRIPT.format(scores=[0.5, 0.9, 0.8, 0.3, 0.85]))
    some = guarded(
        str(tiny), tmp_path, rules=[FALLS], guards=POINTS, trainer={"test_freq": 1, "val_before_train": True},
        evaluate={"reward": [{"name": f"{module}:score"}]},
    )  # fmt: skip
    course = Course(some).run()
    (back,) = events(some, "rollback")
    assert (back["from"], back["to"]) == (3 * BATCH, BATCH)  # the good one was a later one
    assert put_back(course.rollbacks[0], batch_end(course.after[BATCH])) == ["readings"]  # the validation's
    assert events(some, "verdict")[0]["action"] == "rollback_to_best"
    assert course.facts is not None
    assert course.facts["best"]["val/score"] == 0.9
    best = weights(some, "best")
    assert all(torch.equal(best[n], course.after[BATCH]["tensors"][f"actor/weight/{n}"]) for n in best)


def test_the_start_is_the_best_where_nothing_came_after_it(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    module = own(SCRIPT.format(scores=[0.5, 0.1, 0.45]))
    some = guarded(
        str(tiny), tmp_path, rules=[FALLS], trainer={"test_freq": 1, "val_before_train": True},
        evaluate={"reward": [{"name": f"{module}:score"}]},
    )  # fmt: skip
    course = Course(some).run()
    assert [line["to"] for line in events(some, "rollback")] == [0]
    assert same(course.rollbacks[0]["tensors"], course.after[0]["tensors"])


def test_a_rollback_right_after_the_best_does_not_write_over_it(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    """The next batch's own numbers ask for it, at the same update."""
    module = own(
        SCRIPT.format(scores=[0.9])
        + """
    seen = 0

    def third_batch(metrics):
        global seen
        seen += "critic/advantages/max" in metrics
        return "rollback" if seen == 2 and "critic/advantages/max" in metrics else None
"""
    )
    some = guarded(
        str(tiny), tmp_path, rules=[f"{module}:third_batch"], trainer={"test_freq": 1},
        evaluate={"reward": [{"name": f"{module}:score"}]},
    )  # fmt: skip
    course = Course(some, stop_at_rollback=1).run()
    (back,) = events(some, "rollback")
    assert (back["from"], back["to"]) == (BATCH, 0)
    best = course.job.best["snapshot"]
    state = course.job.snapshots.load(int(best))
    assert state.meta["cursor"]["batch"] == 1
    kept = {name: t for name, t in state.tensors.items() if not name.startswith("experience/")}
    assert same(kept, course.after[BATCH]["tensors"])


# broken off and gone on with


def outcome(some: Any) -> dict[str, Any]:
    """All that a run leaves but times and places."""
    lines = standing(read(Path(some.out) / "train" / "journal.jsonl"))
    return {
        "metrics": logged(some),
        "journal": [{k: v for k, v in line.items() if k not in ("time", "seq")} for line in lines],
    }


RULES = [
    at(6, *BACK, {"exclude_rows": True}),
    {"metric": "critic/lr", "above": 0, "for": 6, "rest": 99, "then": [{"reward_clip": [-0.5, 0.5]}]},
    {"metric": "probe/kl_reference", "above": -1, "for": 2, "rest": 1, "then": [{"kl_coef": 1.5}]},
    {"metric": "probe/entropy", "above": 0, "for": 3, "rest": 9, "then": [{"ppo_epochs": 1}]},
]


def test_a_run_broken_off_around_a_rollback_ends_as_the_unbroken_one(tiny: Path, tmp_path: Path) -> None:
    kept = {"snapshot_every": 3, "confirm_steps": 3, "calm": 2}
    once = {"total_epochs": 1}
    whole = guarded(str(tiny), tmp_path, "whole", rules=RULES, guards=kept, trainer=once)
    facts = Course(whole).run().facts
    (back,) = events(whole, "rollback")
    assert back["from"] == 14
    assert any(line["changed"].get("reward_clip") for line in events(whole, "verdict"))
    wanted = outcome(whole)
    breaks: list[dict[str, int]] = [
        *({"stop_at": number} for number in (3, 10, 15)),
        {"stop_at_rollback": 1},
    ]
    for number, where in enumerate(breaks):
        some = guarded(str(tiny), tmp_path, f"run{number}", rules=RULES, guards=kept, trainer=once)
        assert Course(some, **where).run().facts is None, where
        again = ran(some)
        assert same_end(some, whole), where
        assert outcome(some) == wanted, where
        assert facts is not None
        for name in ("updates", "rollbacks", "skipped_updates", "best"):
            assert again[name] == facts[name], where


def test_what_a_signal_saves_is_no_place_to_go_back_to(tiny: Path, tmp_path: Path) -> None:
    """A run that is not broken off has no such place, and both must end alike."""
    rules = [at(6, *BACK)]
    whole, broken = (
        guarded(str(tiny), tmp_path, out, rules=rules, guards={"confirm_steps": 1})
        for out in ("whole", "broken")
    )
    ran(whole)
    assert Course(broken, stop_at=3).run().facts is None
    ran(broken)
    assert [line["to"] for line in events(broken, "rollback")] == [0]
    assert same_end(whole, broken)


def test_epochs_that_a_remedy_adds_come_in_the_batch_that_it_was_taken_in(tiny: Path, tmp_path: Path) -> None:
    """So a run that is broken off in that batch plans it as the unbroken one does."""
    rule = {"metric": "actor/lr", "above": 0, "for": 3, "rest": 99, "then": [{"ppo_epochs": 1}]}
    whole, broken = (guarded(str(tiny), tmp_path, out, rules=[rule]) for out in ("whole", "broken"))
    ran(whole)
    assert len(logged(whole, "actor/lr")) == 4 * (4 + 2)
    assert Course(broken, stop_at=7).run().facts is None
    ran(broken)
    assert same_end(whole, broken)
    assert logged(whole) == logged(broken)


def test_a_run_broken_off_while_it_validates_the_start_goes_back_as_the_unbroken_one(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    """What was read at the start is a baseline: a rollback to the start must not lose it."""
    text = """
        updated = False

        def score(data_source, solution_str, ground_truth, extra_info):
            return 0.8 if updated else 0.5

        def rule(metrics):
            global updated
            updated |= "actor/loss" in metrics
        """
    rises = {"metric": "val/score", "rises": 0.2, "rest": 0, "then": "alert"}
    runs = []
    for out in ("whole", "broken"):
        module = own(text)
        some = guarded(
            str(tiny), tmp_path, out, rules=[at(2, *BACK), rises, f"{module}:rule"],
            trainer={"test_freq": 1, "val_before_train": True}, evaluate={"reward": [f"{module}:score"]},
        )  # fmt: skip
        runs.append(some)
        if out == "broken":
            course = Course(some)
            course.interrupt.signal_number = 2
            assert course.run().facts is None
            assert not course.job.validated
        ran(some)
    assert [line["rule"] for line in events(runs[0], "verdict")] == ["test"] + ["val/score"] * 4
    assert outcome(runs[1])["journal"] == outcome(runs[0])["journal"]
    assert same_end(*runs)


def test_a_signal_while_a_batch_is_made_is_heard_before_its_first_update(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    module = own(
        """
        interrupt = None

        def rule(metrics):
            if interrupt is not None and "probe/kl_reference" in metrics:
                interrupt.signal_number = 2 * (metrics["probe/kl_reference"] > 0)
        """
    )
    whole, some = (guarded(str(tiny), tmp_path, out, rules=[f"{module}:rule"]) for out in ("whole", "run"))
    ran(whole)
    course, namespace = Course(some), importlib.import_module(module)
    namespace.interrupt = course.interrupt
    assert course.run().facts is None
    assert course.job.cursor.number == BATCH
    namespace.interrupt = None
    ran(some)
    assert same_end(some, whole)
    assert logged(some) == logged(whole)


def test_where_several_fire_at_a_rollback_the_first_alone_softens(tiny: Path, tmp_path: Path) -> None:
    rules = [
        at(3, "rollback", {"lr": 0.5}, name="first"),
        at(3, "rollback", {"critic_lr": 0.5}, {"exclude_rows": True}, name="second"),
        at(3, "skip", {"kl_coef": 9}, name="lighter"),
        at(3, {"grad_clip": 0.1}, name="lightest"),
    ]
    course = Course(guarded(str(tiny), tmp_path, rules=rules)).run()
    assert [line.get("rule", line["kind"]) for line in events(course.recipe)] == ["first", "rollback"]
    assert course.job.reins.soft == Softening(lr=0.5)
    assert course.job.reins.excluded == set()
