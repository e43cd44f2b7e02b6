"""What a verdict does to a run: skip, stop_epochs, pause, stop, refresh, remedies, and who is told."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guarded import BATCH, LR, Course, events, guarded, logged, ran, same, same_end, values, weights
from listener import listening
from rows_made import random_trajectories

from rein.config.guards import Rule
from rein.errors import GuardStop
from rein.guards.presets import preset as rules_of
from rein.learner import Learner
from rein.stages import train
from rein.stages.train_job import Job
from rein.tracking.console import Console
from rein.types import Softening, Trajectory


def third(role: str, *then: Any, **more: Any) -> dict[str, Any]:
    """Fires once, at the third update of that role."""
    rule = {"name": "test", "metric": f"{role}/lr", "above": 0, "for": 3, "rest": 999, "then": list(then)}
    return rule | more


def gradients(learner: Learner, role: str) -> list[Any]:
    return [p.grad for p in learner.optimizers[role].parameters if p.grad is not None]


# one update is left out


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_skipped_update_leaves_everything_bit_equal_but_its_place_in_the_schedule(
    role: str, tiny: Path, tmp_path: Path
) -> None:
    pending: list[int] = []

    def look(job: Job) -> None:
        pending.append(sum(len(gradients(job.learner, some)) for some in ("actor", "critic")))

    course = Course(guarded(str(tiny), tmp_path, rules=[third(role, "skip")]), also=look).run()
    number = {"critic": 3, "actor": 7}[role]
    assert set(pending) == {0}  # nothing is left to be added to the next one's gradients
    before, after = course.after[number - 1], course.after[number]
    assert same(before["tensors"], after["tensors"])
    steps = [state["meta"][role]["step"] for state in (before, after)]
    assert steps == [2, 3]
    assert after["cursor"][2:] == (number, number)
    for other in range(1, BATCH):
        if other != number:
            assert not same(course.after[other - 1]["tensors"], course.after[other]["tensors"])
    assert course.facts is not None
    assert course.facts["skipped_updates"] == 1
    assert [line["guard/skipped"] for line in logged(course.recipe, "guard/skipped")] == [1]
    assert [line["number"] for line in logged(course.recipe, "guard/test")] == [number]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_stop_epochs_drops_the_rest_of_its_role_in_this_batch_and_nothing_else(
    role: str, tiny: Path, tmp_path: Path
) -> None:
    """The other role goes on, schedules end where they would have, the next batch is whole again."""
    schedule = {"optim": {"lr": LR, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.1}}
    rule = third(role, "stop_epochs", **{"for": 2})
    course = Course(guarded(str(tiny), tmp_path, rules=[rule], actor=schedule, critic=schedule)).run()
    first = {"critic": 1, "actor": 5}[role]  # its updates of the batch are first to first + 3
    kept, dropped = course.after[first], [course.after[first + n] for n in (1, 2, 3)]
    for state in dropped:
        own = {name: t for name, t in state["tensors"].items() if name.startswith(role)}
        assert same(own, {name: kept["tensors"][name] for name in own})
        assert state["dropped"] == {role}
    assert [state["meta"][role]["step"] for state in (kept, *dropped)] == [1, 2, 3, 4]
    lines = [{line["number"] for line in logged(course.recipe, f"{r}/lr")} for r in ("critic", "actor")]
    everything = [{*range(1, 5), *range(9, 13)}, {*range(5, 9), *range(13, 17)}]
    everything[role == "actor"] -= {first + 2, first + 3}
    assert [found & set(range(17)) for found in lines] == everything
    for other in ("actor", "critic"):
        optimizer = course.job.learner.optimizers[other]
        assert optimizer.step == optimizer.total_steps == 16
        assert values(course.recipe, f"{other}/lr")[-1] == pytest.approx(LR / 10)
        assert gradients(course.job.learner, other) == []
    assert course.after[BATCH + 1]["dropped"] == set()
    # A line of metrics stands for each update, whatever came of it.
    assert {line["number"] for line in logged(course.recipe)} == set(range(33))


def test_a_function_that_drops_every_batch_never_holds_a_run_up(
    tiny: Path, tmp_path: Path, own: Callable[[str], str]
) -> None:
    """Said of every probe and every batch, stop_epochs passes the batches over, one by one."""
    module = own(
        """
        def rule(metrics):
            late = "probe/kl_reference" in metrics or "critic/advantages/max" in metrics
            return "stop_epochs" if late else None
        """
    )
    some = guarded(str(tiny), tmp_path, rules=[f"{module}:rule"])
    with pytest.raises(GuardStop, match="were skipped"):  # nothing was trained
        Course(some).run()
    assert not logged(some, "actor/lr")
    assert {line["action"] for line in events(some)} == {"stop_epochs"}


def test_stop_epochs_on_a_probe_ends_the_batch_for_both_roles(tiny: Path, tmp_path: Path) -> None:
    rule = {"metric": "probe/entropy", "above": 0, "for": 2, "rest": 99, "then": "stop_epochs"}
    batches = {"ppo_mini_batch_size": 1}  # 16 updates, the probe after the first 8
    some = guarded(str(tiny), tmp_path, rules=[rule], actor=batches, trainer={"total_epochs": 1})
    course = Course(some).run()
    (line,) = events(some)
    assert (line["action"], line["number"]) == ("stop_epochs", 8)
    assert {found["number"] for found in logged(some, "actor/lr")} == {*range(23, 29)}
    assert same(course.after[8]["tensors"], course.after[16]["tensors"])
    assert course.after[16]["meta"]["actor"]["step"] == 8


# the run goes on, softened or not


def test_an_alert_changes_nothing_but_the_journal(tiny: Path, tmp_path: Path) -> None:
    alerts = [
        third("actor", "alert"),
        {"metric": "probe/entropy", "above": 0},
        {"metric": "kl/old", "above": -1},
    ]
    quiet = [{"metric": "actor/lr", "above": 99, "then": "rollback"}]
    runs = [guarded(str(tiny), tmp_path, out, rules=r) for out, r in (("alerts", alerts), ("quiet", quiet))]
    for some in runs:
        assert ran(some)["rollbacks"] == 0
    assert same_end(*runs)
    assert events(runs[1]) == []
    assert {line["rule"] for line in events(runs[0])} == {"test", "probe/entropy", "kl/old"}
    assert {line["action"] for line in events(runs[0])} == {"alert"}
    (line,) = [line for line in events(runs[0]) if line["rule"] == "test"]
    assert line["reason"] == "actor/lr 0.01 is above 0 (3 readings)"
    assert (line["number"], line["metric"], line["value"], line["limit"]) == (7, "actor/lr", LR, 0)
    without = [{k: v for k, v in line.items() if not k.startswith("guard/")} for line in logged(runs[0])]
    assert without == logged(runs[1])


def test_what_fires_is_in_the_metrics_under_its_rule_s_name_with_its_value(
    tiny: Path, tmp_path: Path
) -> None:
    rules = [
        third("actor", "alert"),
        {"name": "batch", "metric": "critic/advantages/max", "above": -9, "rest": 0},
        {"name": "probe", "metric": "probe/entropy", "above": 0, "rest": 0},
        {"name": "score", "metric": "val/score", "below": 9, "rest": 0},
    ]
    some = guarded(str(tiny), tmp_path, rules=rules)
    ran(some)
    found = {
        name: [(line["number"], line[f"guard/{name}"]) for line in logged(some, f"guard/{name}")]
        for name in ("test", "batch", "probe", "score")
    }
    assert found["test"] == [(7, LR)]
    for name, metric in (
        ("batch", "critic/advantages/max"),
        ("probe", "probe/entropy"),
        ("score", "val/score"),
    ):
        assert found[name] == [(line["number"], line[metric]) for line in logged(some, metric)], name
    numbers = [(line["rule"], line["number"]) for line in events(some)]
    assert ("probe", 0) in numbers
    assert ("score", 32) in numbers


def test_a_batch_that_is_given_up_leaves_its_numbers_in_the_metrics(tiny: Path, tmp_path: Path) -> None:
    rule = {"name": "batch", "metric": "critic/advantages/max", "above": -9, "for": 2, "then": "rollback"}
    some = guarded(str(tiny), tmp_path, rules=[rule], guards={"max_rollbacks": 0})
    with pytest.raises(GuardStop):
        ran(some)
    (line,) = logged(some, "guard/batch")
    assert line["number"] == BATCH
    assert line["guard/batch"] == line["critic/advantages/max"]


def test_remedies_of_all_that_fired_are_taken_and_told_apart_in_the_journal(
    tiny: Path, tmp_path: Path
) -> None:
    rules = [
        third("actor", {"lr": 0.5}),
        third("actor", {"lr": 0.5}, {"kl_coef": 3}, name="other"),
        third("actor", {"entropy_coeff": 0.01}, name="last"),
    ]
    some = guarded(str(tiny), tmp_path, rules=rules)
    course = Course(some).run()
    assert course.job.reins.soft == Softening(lr=0.25, kl_coef=3.0, entropy_coeff=0.01)
    assert [line["changed"] for line in events(some)] == [
        {"lr": [1.0, 0.5]}, {"lr": [0.5, 0.25], "kl_coef": [1.0, 3.0]}, {"entropy_coeff": [None, 0.01]}
    ]  # fmt: skip
    assert {line["action"] for line in events(some)} == {"soften"}
    assert set(values(some, "actor/lr")[3:]) == {LR / 4}
    assert len(values(some, "actor/entropy")) == len(values(some, "actor/lr")) - 3


def test_remedies_are_given_back_by_halves_while_probes_are_healthy(tiny: Path, tmp_path: Path) -> None:
    """A root each time: .0625, .25, .5, .707, .841, then 1; the KL likewise; what has no half at once."""
    rule = third("actor", {"lr": 0.0625}, {"kl_coef": 16}, {"entropy_coeff": 0.01}, {"grad_clip": 0.5})
    some = guarded(str(tiny), tmp_path, rules=[rule], guards={"calm": 2}, trainer={"total_epochs": 6})
    course = Course(some).run()
    decays = events(some, "decay")
    assert [line["number"] for line in decays] == [2 * BATCH, 4 * BATCH, 6 * BATCH, 8 * BATCH, 10 * BATCH]
    rates = [line["changed"]["lr"][1] for line in decays]
    assert rates == pytest.approx([0.25, 0.5, 0.5**0.5, 0.5**0.25, 1.0])
    assert [line["changed"]["kl_coef"][1] for line in decays] == pytest.approx([4, 2, 2**0.5, 2**0.25, 1])
    assert decays[0]["changed"]["grad_clip"] == [0.5, None]
    assert decays[0]["changed"]["entropy_coeff"] == [0.01, None]
    assert decays[0]["reason"] == "2 healthy probes"
    assert course.job.reins.soft == Softening()
    assert values(some, "actor/lr")[-1] == LR


def test_a_probe_that_softens_is_no_healthy_one(tiny: Path, tmp_path: Path) -> None:
    rules = [
        third("actor", {"lr": 0.25}),
        {"metric": "probe/entropy", "above": 0, "for": 3, "rest": 99, "then": [{"critic_lr": 0.25}]},
    ]
    some = guarded(str(tiny), tmp_path, rules=rules, guards={"calm": 2})
    ran(some)
    lines = [(line["kind"], line["number"]) for line in events(some)]
    assert lines == [("verdict", 7), ("verdict", 16), ("decay", 32)]


# rewards clipped otherwise


def scored(value: float) -> list[Trajectory]:
    rows = random_trajectories(14)
    rows[5] = rows[5].with_score(value)
    return rows


def test_a_reward_clip_makes_what_is_left_of_the_batch_anew(tiny: Path, tmp_path: Path) -> None:
    rule = {"metric": "critic/vf_loss", "above": 100, "then": ["skip", {"reward_clip": [-1, 1]}]}
    some = guarded(str(tiny), tmp_path, rows=scored(1e4), rules=[rule])
    facts = ran(some)
    (line,) = events(some)
    assert line["changed"] == {"reward_clip": [None, [-1.0, 1.0]]}
    number = line["number"]
    rewards = [(found["number"], found["critic/rewards/max"]) for found in logged(some, "critic/rewards/max")]
    batch = next(first for first, reward in rewards if reward == 1e4)  # its first update
    assert [reward for first, reward in rewards if first == batch] == [1e4]
    assert all(reward <= 1 for first, reward in rewards if first > batch)
    again = [first for first, _ in rewards if first == number + 1]
    assert again  # made once more, before the batch's next update
    assert (
        max(found["critic/vf_loss"] for found in logged(some, "critic/vf_loss") if found["number"] > number)
        < 2
    )
    assert (facts["updates"], facts["skipped_updates"], facts["rollbacks"]) == (32, 1, 0)
    assert values(some, "critic/score/max")[-1] <= 1 or values(some, "critic/score/max")[-2] <= 1


def test_a_batch_whose_numbers_clip_the_rewards_is_made_anew_before_any_update(
    tiny: Path, tmp_path: Path
) -> None:
    rule = {
        "name": "outlier",
        "metric": "critic/returns/mean",
        "above": 50,
        "then": [{"reward_clip": [-1, 1]}],
    }
    some, clipped = (
        guarded(str(tiny), tmp_path, out, rows=scored(1e4), **more)
        for out, more in (
            ("run", {"rules": [rule]}),
            ("clipped", {"reward_manager": {"clip_range": [-1, 1]}}),
        )
    )
    ran(some)
    ran(clipped)
    assert len(events(some)) == 1
    assert same_end(some, clipped)  # as if they had been clipped from the start
    assert {line["number"] for line in logged(some)} == set(range(33))


def test_rewards_clipped_in_the_critic_s_fit_are_clipped_from_the_next_mini_batch_on(
    tiny: Path, tmp_path: Path
) -> None:
    rule = {"metric": "critic/vf_loss", "above": 100, "then": ["skip", {"reward_clip": [-1, 1]}]}
    some = guarded(
        str(tiny), tmp_path, rows=scored(1e4), rules=[rule], trainer={"critic_warmup": 12},
        critic={"fit_until": 1.0},
    )  # fmt: skip
    ran(some)
    (line,) = events(some)
    losses = {found["number"]: found["critic/vf_loss"] for found in logged(some, "critic/vf_loss")}
    assert line["number"] < 12
    assert max(loss for number, loss in losses.items() if number != line["number"]) < 2
    assert len(values(some, "critic/advantages/max")) == 4  # no batch is made twice for it


# the run is left


NO_ROUNDS = (
    "asks for fresh rollouts, and this recipe cannot have them scored (score among its stages) or written "
    "(rollout.engine hf or vllm); the same command goes on with the rows it has"
)
WORDS = {
    "pause": "paused; read journal.jsonl, then go on with the same command",
    "stop": "stopped; the state before is saved",
    "refresh": NO_ROUNDS,
}


def test_a_run_left_before_an_update_goes_on_as_if_it_had_been_skipped(tiny: Path, tmp_path: Path) -> None:
    once = {"total_epochs": 1}
    skipped = Course(
        guarded(str(tiny), tmp_path, "skipped", rules=[third("actor", "skip")], trainer=once)
    ).run()
    for word, said in WORDS.items():
        left = guarded(str(tiny), tmp_path, word, rules=[third("actor", word)], trainer=once)
        with pytest.raises(GuardStop) as caught:
            ran(left)
        folder = Path(left.out) / "train"
        assert str(caught.value) == (
            f"train: actor/lr 0.01 is above 0 (3 readings): {said} ({folder / 'snapshots'})"
        )
        assert caught.value.exit_code == 4
        assert [line["action"] for line in events(left, "verdict")] == [word]
        assert [line["action"] for line in events(left, "end")] == [word]
        assert (folder / "last").exists() == (word != "stop")
        if word != "stop":
            last, then = weights(left), skipped.after[7]["tensors"]
            assert all(last[name].equal(then[f"actor/weight/{name}"]) for name in last)
        facts = ran(left)
        assert same_end(left, skipped.recipe)
        assert logged(left) == logged(skipped.recipe)
        assert (facts["updates"], facts["skipped_updates"]) == (16, 1)


@pytest.mark.parametrize(
    ("reading", "word"),
    [(1, "pause"), (2, "stop"), (5, "refresh")],
    ids=["start", "mid-batch", "end"],
)
def test_a_run_left_after_a_probe_goes_on_as_if_it_had_been_an_alert(
    reading: int, word: str, tiny: Path, tmp_path: Path
) -> None:
    rule = {"metric": "probe/entropy", "above": 0, "for": reading, "rest": 99}
    more: dict[str, Any] = {
        "trainer": {"total_epochs": 1},
        "actor": {"ppo_mini_batch_size": 2, "ppo_epochs": 3},
    }
    left, alert = (
        guarded(str(tiny), tmp_path, out, rules=[rule | {"then": then}], **more)
        for out, then in (("left", word), ("alert", "alert"))
    )
    ran(alert)
    with pytest.raises(GuardStop) as caught:
        ran(left)
    assert WORDS[word] in str(caught.value)
    ran(left)
    assert same_end(left, alert)


def test_a_run_left_in_the_critic_s_fit_goes_on_there(tiny: Path, tmp_path: Path) -> None:
    fit: dict[str, Any] = {"trainer": {"critic_warmup": 6}, "critic": {"fit_until": 1.0}}
    left, skipped = (
        guarded(str(tiny), tmp_path, out, rules=[third("critic", then)], **fit)
        for out, then in (("left", "pause"), ("skipped", "skip"))
    )
    with pytest.raises(GuardStop, match="paused"):
        ran(left)
    ran(left)
    ran(skipped)
    assert same_end(left, skipped)


# who is told


@pytest.mark.usefixtures("no_proxy")
def test_a_webhook_gets_every_line_of_the_journal_and_which_run_it_is(tiny: Path, tmp_path: Path) -> None:
    rules = [third("actor", "rollback", {"lr": 0.5}, above=0.9 * LR)]
    with listening() as server:
        url = f"http://127.0.0.1:{server.server_port}/hook"
        some = guarded(str(tiny), tmp_path, rules=rules, guards={"webhook": url, "calm": 3})
        ran(some)
    lines = events(some)
    assert {line["kind"] for line in lines} == {"verdict", "rollback", "decay"}
    assert [json.loads(body) for _, body in server.heard] == [line | {"out": some.out} for line in lines]
    assert {kind for kind, _ in server.heard} == {"application/json"}


@pytest.mark.usefixtures("no_proxy")
def test_what_is_not_finite_is_posted_as_json_too(tiny: Path, tmp_path: Path) -> None:
    with listening() as server:
        url = f"http://127.0.0.1:{server.server_port}/"
        ran(guarded(str(tiny), tmp_path, rows=scored(3e38), guards={"webhook": url}))
    found = [
        json.loads(body, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        for _, body in server.heard
    ]
    assert found[0]["value"] in ("inf", "nan")
    assert found[0]["limit"] == "inf"


@pytest.mark.usefixtures("no_proxy")
def test_a_url_that_does_not_answer_warns_once_and_the_run_goes_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening() as server:
        url = f"http://127.0.0.1:{server.server_port}/"  # closed again when the run posts
    some = guarded(str(tiny), tmp_path, rules=[{"metric": "actor/lr", "above": 0}], guards={"webhook": url})
    facts = train.run(some, Console())
    said = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: guards.webhook")
    ]
    assert len(said) == 1
    assert f"{url} does not answer" in said[0]
    assert "events go on to journal.jsonl" in said[0]
    assert facts["updates"] == 32
    assert len(events(some)) > 2


# the presets on a run


OPTIONAL = {
    "val/proxy_score",  # where the reward that trains is not the truth
    "rollout_corr/seq_pareto_k",  # of enough rows
}


def test_every_metric_that_a_preset_watches_is_one_that_a_run_has(tiny: Path, tmp_path: Path) -> None:
    some = guarded(str(tiny), tmp_path, trainer={"critic_warmup": 1, "total_epochs": 1})
    ran(some)
    known = {name for line in logged(some) for name in line} | {"*"}
    for preset in ("standard", "cautious"):
        watched = {
            condition.metric
            for rule in map(Rule.model_validate, rules_of(preset))
            for condition in (rule, *(rule.when or []))
        }
        assert watched - OPTIONAL <= known
        assert OPTIONAL & watched
    assert not OPTIONAL & known


def test_a_metric_that_never_comes_is_said_once_with_the_nearest_that_does(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = ("actor/grad_nrom", "actor/grad_norm", "val/score")
    rules = [{"name": metric, "metric": metric, "above": 1e30} for metric in watched]
    train.run(guarded(str(tiny), tmp_path, rules=rules), Console())
    said = [line for line in capsys.readouterr().out.splitlines() if "guards.rules" in line]
    assert said == [
        "warning: guards.rules: actor/grad_nrom was not there in the first batch; did you mean "
        "actor/grad_norm?"
    ]
