"""What a recipe's `guards` section becomes: the presets' rules and its own, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rein import cli
from rein.config.guards import ACTIONS, REMEDIES, Rule
from rein.config.load import dump, load
from rein.config.recipe import Guards
from rein.errors import ConfigError, UserCodeError
from rein.guards.presets import INSTEAD, TOO_LATE, acts, guards_of, preset
from rein.guards.rules import KINDS, NotFinite, RuleGuard
from rein.guards.user import UserRule
from rein.protocols import Guard
from rein.remedies import soften
from rein.types import Action, Softening, Verdict

PRESETS = ("standard", "cautious")


def made(*rules: Any, preset: str = "off") -> list[Guard]:
    return guards_of(Guards.model_validate({"preset": preset, "rules": list(rules)}))


def by_name(guards: list[Guard]) -> dict[str, Guard]:
    return {guard.name: guard for guard in guards}


def rule_of(guards: list[Guard], name: str) -> Rule:
    found = by_name(guards)[name]
    assert isinstance(found, RuleGuard)
    return found.rule


# presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_loads_and_its_rules_have_names_of_their_own(name: str) -> None:
    rules = preset(name)
    assert len({rule["name"] for rule in rules}) == len(rules) > 20
    guards = made(preset=name)
    assert sorted(guard.name for guard in guards) == sorted(rule["name"] for rule in rules)
    assert isinstance(guards[0], NotFinite)
    assert acts(guards)


def test_off_leaves_what_is_not_finite_alone() -> None:
    guards = made()
    assert [type(guard) for guard in guards] == [NotFinite]
    assert not acts(guards)


@pytest.mark.parametrize("name", PRESETS)
def test_every_remedy_of_a_preset_is_one_that_can_be_taken(name: str) -> None:
    for guard in made(preset=name):
        soft = soften(Softening(), guard.remedies)  # type: ignore[attr-defined]
        assert guard.remedies == () or soft != Softening(), guard.name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PRESETS)
def test_a_rule_of_a_preset_is_also_one_of_a_recipe(name: str) -> None:
    """Written out by hand over no preset, the same guards come of it."""
    found, same = made(preset=name), made(*preset(name))
    assert {g.name: vars(g)["rule"] for g in found[1:]} == {g.name: vars(g)["rule"] for g in same[1:]}
    assert vars(same[0]) if hasattr(same[0], "__dict__") else repr(same[0]) == repr(found[0])


def test_what_the_cautious_preset_limits_the_standard_one_limits_no_tighter() -> None:
    cautious, standard = (
        {r["name"]: r for r in preset(name) if "above" in r and "for" not in r} for name in PRESETS[::-1]
    )
    shared = cautious.keys() & standard.keys()
    assert len(shared) > 8
    for name in shared:
        if cautious[name]["metric"] == standard[name]["metric"]:
            assert cautious[name]["above"] <= standard[name]["above"], name


# a recipe's own rules beside them


def test_a_number_given_under_a_preset_s_name_changes_that_alone() -> None:
    plain, own = made(preset="standard"), made({"name": "kl_high", "above": 0.7}, preset="standard")
    assert rule_of(own, "kl_high") == rule_of(plain, "kl_high").model_copy(update={"above": 0.7})
    assert [guard.name for guard in own] == [guard.name for guard in plain]
    for name in by_name(plain).keys() - {"kl_high", "not_finite"}:
        assert rule_of(own, name) == rule_of(plain, name)


def test_other_keys_under_a_preset_s_name_keep_the_rest_too() -> None:
    plain = rule_of(made(preset="standard"), "hacking")
    when = {"metric": "val/score", "falls": 0.5}
    for own, changed in (
        ({"for": 4}, {"patience": 4}),
        ({"rest": 9}, {"rest": 9}),
        ({"then": ["alert", {"lr": 0.2}]}, {"then": ["alert", {"lr": 0.2}]}),
        ({"when": when}, {"when": Rule(when=when).when}),  # type: ignore[arg-type]
    ):
        found = rule_of(made({"name": "hacking"} | own, preset="standard"), "hacking")
        assert found == plain.model_copy(update=changed)


def test_another_test_takes_the_place_of_the_preset_s() -> None:
    found = rule_of(made({"name": "kl_high", "rises": 0.1}, preset="standard"), "kl_high")
    assert (found.above, found.rises) == (None, 0.1)
    assert found.then == rule_of(made(preset="standard"), "kl_high").then


def test_a_rule_of_another_name_comes_to_the_preset_s() -> None:
    guards = made({"metric": "kl/old", "above": 0.1, "then": "skip"}, preset="standard")
    assert len(guards) == len(made(preset="standard")) + 1
    assert rule_of(guards, "kl/old").then == ["skip"]


def test_rules_of_one_metric_without_names_are_numbered() -> None:
    guards = made(*({"metric": "kl/old", "above": limit} for limit in (0.1, 0.2, 0.3)))
    assert [guard.name for guard in guards[1:]] == ["kl/old", "kl/old 2", "kl/old 3"]
    assert [rule_of(guards, guard.name).above for guard in guards[1:]] == [0.1, 0.2, 0.3]


def test_remedies_for_what_is_not_finite_are_changed_by_its_name() -> None:
    (first, *_) = made({"name": "not_finite", "then": ["skip", {"lr": 0.5}]}, preset="standard")
    assert isinstance(first, NotFinite)
    assert first.remedies == (("lr", 0.5),)
    (only,) = made({"name": "not_finite", "metric": "*", "not_finite": True, "then": [{"lr": 0.25}]})
    assert isinstance(only, NotFinite)
    assert only.remedies == (("lr", 0.25),)


def test_a_recipe_on_disk_and_its_resolved_copy_make_the_same_guards(tmp_path: Path) -> None:
    body = {
        "guards": {
            "preset": "standard",
            "rules": [
                {"name": "kl_high", "above": 0.2, "for": 2},
                {"metric": "kl/old", "above": 1e-3, "then": [{"lr": 0.5}]},
                {"metric": "val/score", "falls": 0.1, "against": "best", "then": "rollback_to_best"},
                {"metric": "actor/pg_loss", "flat": 0.1, "when": {"metric": "kl/old", "below": 1}},
            ],
        }
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(body))
    first, _ = load(tmp_path / "recipe.yaml")
    dump(first, tmp_path / "recipe.json")
    second, _ = load(tmp_path / "recipe.json")
    one, other = (guards_of(some.guards) for some in (first, second))
    assert [vars(g)["rule"] for g in one[1:]] == [vars(g)["rule"] for g in other[1:]]
    assert rule_of(one, "kl_high").patience == 2


def test_a_rule_is_written_on_the_command_line_too() -> None:
    some, _ = load(
        None, ["guards.rules=[{metric: kl/old, above: 1e-3, for: 2, then: [stop_epochs, {lr: 0.5}]}]"]
    )
    found = rule_of(guards_of(some.guards), "kl/old")
    assert (found.above, found.patience, found.then) == (1e-3, 2, ["stop_epochs", {"lr": 0.5}])


# what is refused, with what to do


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"metric": "kl/old"}, "kl/old has no limit; write exactly one of above, below"),
        ({"metric": "kl/old", "not_finite": False}, "kl/old has no limit"),
        ({"metric": "kl/old", "above": 1, "below": 0}, "kl/old has above and below; write exactly one"),
        ({"above": 1}, "has no metric; write one, or the name of a rule of the preset"),
        ({"name": "kl_hihg", "above": 1}, "kl_hihg has no metric; write one, or the name of a rule"),
        ({"metric": "kl/old", "above": 1, "when": {"metric": "val/score"}}, "val/score has no limit"),
        ({"metric": "kl/old", "above": 1, "when": {"below": 1}}, "has no metric"),
        *(
            ({"metric": name, "below": 0.1}, f"{name} describes the stored rows and cannot move; watch {use}")
            for name, use in (
                *(("critic/score/mean", "val/score"), ("critic/score/max", "val/score")),
                *(("critic/rewards/mean", "val/score"), ("response_length/mean", "val/response_length")),
            )
        ),
        (
            {"metric": "kl/old", "above": 1, "when": {"metric": "response_length/mean", "above": 9}},
            "response_length/mean describes the stored rows and cannot move; watch val/response_length",
        ),
        *(
            ({"metric": name, "above": 1, "then": then}, f"{name} is not read of an update, so")
            for then in ("skip", ["alert", {"exclude_rows": True}], ["rollback", {"exclude_rows": True}])
            for name in (
                *("probe/kl_reference", "probe/entropy", "val/score", "kl/behavior", "kl/reference_capped"),
                *("rollout_corr/raw_ess", "training/log_prob_diff_max", "critic/vf_explained_var"),
                *("critic/advantages/max", "critic/values/mean", "critic/returns/mean", "shaping/overlong"),
                *("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"),
            )
        ),
        ({"metric": "*", "not_finite": True}, "not_finite reads every loss and gradient (*)"),
        ({"metric": "*", "above": 3}, "not_finite reads every loss and gradient"),
        ({"name": "not_finite", "metric": "kl/old", "above": 3}, "give your rule a metric and another name"),
        ({"name": "not_finite", "metric": "*", "not_finite": True, "then": "rollback"}, "always skips"),
        ({"name": "not_finite", "metric": "*", "not_finite": True, "for": 2}, "always skips; change"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_work_is_refused_with_what_to_write(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made({"metric": "kl/old", "above": 1}, rule)
    assert str(caught.value).startswith("guards.rules[1]: ")
    assert said in str(caught.value)


def test_every_metric_that_cannot_move_is_refused_above() -> None:
    refused = [
        case[0] for case in test_a_rule_that_cannot_work_is_refused_with_what_to_write.pytestmark[0].args[1]
    ]
    names = [str(rule.get("metric")) for rule in refused]
    for pattern in (*INSTEAD, *TOO_LATE):
        assert any(name.startswith(pattern.rstrip("*")) for name in names), pattern


def test_what_is_read_of_an_update_may_be_skipped() -> None:
    for metric in ("actor/grad_norm", "critic/vf_loss", "kl/old", "actor/ratio_mean", "actor/kl_loss"):
        made({"metric": metric, "above": 1, "then": ["skip", {"exclude_rows": True}]})


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("[{metric: kl/old, above: 1, then: rolback}]", "rolback is no action; did you mean rollback?"),
        (
            "[{metric: kl/old, above: 1, then: [{kl_coeff: 2}]}]",
            "kl_coeff is no remedy; did you mean kl_coef?",
        ),
        ("[{metric: kl/old, above: 1, then: explode}]", f"explode is no action; known: {', '.join(ACTIONS)}"),
        ("[{metric: kl/old, above: 1, then: [{x: 1}]}]", f"x is no remedy; known: {', '.join(REMEDIES)}"),
        (
            "[{metric: kl/old, above: 1, then: [{lr: 0.5, kl_coef: 2}]}]",
            "is not one remedy; write [{lr: 0.5}",
        ),
        (
            "[{metric: kl/old, above: 1, then: [skip, rollback]}]",
            "then has skip and rollback; write one of them",
        ),
        ("[{metric: kl/old, abov: 1}]", "abov is not known there; did you mean above?"),
        ("[{metric: kl/old, above: 1, patiance: 2}]", "patiance is not known there"),
        ("[{metric: kl/old, above: 1, against: begin}]", 'rules[0].against="begin": must be one of start'),
        ("[{metric: kl/old, above: 1, for: 0}]", "rules[0].for=0: must be above 0"),
        ("[{metric: kl/old, above: .nan}]", "a finite number"),
        ("[{metric: kl/old, flat: 1, window: 1}]", "at least 2"),
    ],
)
def test_a_rule_with_an_unknown_word_is_refused_when_the_recipe_is_read(rules: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"guards.rules={rules}"])
    assert "guards.rules" in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("{lr: -1}", "lr -1; write a number between 0 and 100"),
        ("{lr: fast}", "lr fast; write a number"),
        ("{kl_coef: true}", "kl_coef True; write a number"),
        ("{kl_coef_at: 11}", "kl_coef_at 11; write a number between 0 and 10"),
        ("{entropy_coeff: 1}", "entropy_coeff 1; write a number between 0 and 0.1"),
        ("{grad_clip: 0}", "grad_clip 0; write a number between 0.05 and 100"),
        ("{temperature: 9}", "temperature 9; write a number between 0.2 and 2"),
        ("{ppo_epochs: 0}", "ppo_epochs 0; write a whole number"),
        ("{ppo_epochs: 1.5}", "ppo_epochs 1.5; write a whole number"),
        ("{ppo_epochs: true}", "ppo_epochs True; write a whole number"),
        ("{ppo_epochs: 5}", "ppo_epochs 5; write a whole number"),
        *(
            (f"{{reward_clip: {ends}}}", "write two numbers, [-2, 2]")
            for ends in ("2", "[2, -2]", "[1, 1]", "[1]", "[a, b]", "ab", "[0, null]", "[false, true]")
        ),
        ("{exclude_rows: 3}", "exclude_rows takes true"),
    ],
)
def test_an_amount_that_makes_no_sense_is_refused_before_any_work(
    then: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = f"guards.rules=[{{metric: actor/loss, above: 9, then: [{then}]}}]"
    assert cli.main(["train", rule, f"out={tmp_path}/run", "model.path=none", "data.train_files=none"]) == 2
    assert said in capsys.readouterr().err


# functions of the user's


def test_a_user_s_function_is_asked_and_answers_with_a_word_a_verdict_or_nothing(own: Any) -> None:
    module = own(
        """
        from rein.types import Action, Verdict

        def word(metrics):
            return "rollback" if metrics["actor/loss"] > 1 else None

        def whole(metrics):
            return Verdict("skip", "too much", value=metrics["actor/loss"], remedies={"lr": 0.5})

        def best(metrics):
            return "rollback_to_best"

        def look(metrics):
            return "alert"

        def fine(metrics):
            return "continue" if metrics["actor/loss"] else Verdict()
        """
    )
    names = [f"{module}:{name}" for name in ("word", "whole", "best", "look", "fine")]
    word, whole, best, look, fine = made(*names)[1:]
    assert [guard.name for guard in (word, whole, best, look, fine)] == names
    assert word({"actor/loss": 1.0}) is None
    assert word({"actor/loss": 2.0}) == Verdict(Action.ROLLBACK, f"{names[0]} says rollback", names[0])
    said = whole({"actor/loss": 2.0})
    assert said == Verdict(Action.SKIP, "too much", names[1], value=2.0, remedies=(("lr", 0.5),))
    assert said.action is Action.SKIP
    found = best({})
    assert found is not None
    assert (found.action, found.to_best) == (Action.ROLLBACK, True)
    alert = look({})
    assert alert is not None
    assert alert.action is Action.CONTINUE
    assert fine({"actor/loss": 0.0}) is fine({"actor/loss": 1.0}) is None


def test_a_user_s_class_is_made_once_and_its_state_is_kept(own: Any) -> None:
    module = own(
        """
        class Third:
            made = 0

            def __init__(self):
                self.seen = []
                Third.made += 1

            def __call__(self, metrics):
                metrics["spoiled"] = True
                self.seen.append(metrics["actor/loss"])
                return "pause" if len(self.seen) == 3 else None

            def state(self):
                return {"seen": self.seen}

            def restore(self, state):
                self.seen = list(state["seen"])

        def plain(metrics):
            return None
        """
    )
    (_, rule, plain), metrics = made(f"{module}:Third", f"{module}:plain"), {"actor/loss": 0.5}
    assert isinstance(rule, UserRule)
    assert rule(metrics) is None
    assert metrics == {"actor/loss": 0.5}
    kept = rule.state()
    assert rule(metrics) is None
    assert rule.state() == {"seen": [0.5, 0.5]} != kept == {"seen": [0.5]}
    other = made(f"{module}:Third")[1]
    other.restore(kept)
    assert [found and found.action for found in (other(metrics), other(metrics))] == [None, Action.PAUSE]
    assert plain.state() == {}
    plain.restore({})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('out of luck')", "raised RuntimeError (out of luck); mend it and go on"),
        ("return metrics['none']", "raised KeyError ('none')"),
        ("raise SystemExit(0)", "raised SystemExit (0)"),
        ("return 3", "returned 3; return None, a Verdict or one of alert, skip"),
        ("return 'explode'", "returned 'explode'; return None"),
        ("return {'action': 'skip'}", "returned {'action': 'skip'}; return None"),
        ("return True", "returned True; return None"),
        ("return Verdict('explode')", "return None, a Verdict or one of"),
        ("return Verdict('skip', value='much')", "return None, a Verdict or one of"),
        ("return Verdict('skip', remedies=3)", "return None, a Verdict or one of"),
    ],
)
def test_a_user_s_function_that_fails_or_answers_nonsense_is_named(body: str, said: str, own: Any) -> None:
    module = own(f"from rein.types import Verdict\ndef rule(metrics):\n    {body}\n")
    (rule,) = made(f"{module}:rule")[1:]
    with pytest.raises(UserCodeError) as caught:
        rule({"actor/loss": 1.0})
    assert str(caught.value).startswith(f"guards.rules: {module}:rule r")
    assert said in str(caught.value)
    assert caught.value.exit_code == 8


def test_a_user_s_class_that_cannot_be_made_kept_or_restored_is_named(own: Any) -> None:
    module = own(
        """
        class Broken:
            def __init__(self):
                raise ValueError("no luck")

        class Odd:
            def __call__(self, metrics):
                return None
            def state(self):
                return {"odd": {1, 2}}
            def restore(self, state):
                raise KeyError("even")
        """
    )
    with pytest.raises(UserCodeError, match=r"Broken raised ValueError \(no luck\)"):
        made(f"{module}:Broken")
    (odd,) = made(f"{module}:Odd")[1:]
    with pytest.raises(UserCodeError, match="Odd has a state that is no JSON"):
        odd.state()
    with pytest.raises(UserCodeError, match="Odd raised KeyError"):
        odd.restore({})


def test_a_user_s_function_that_is_not_there_is_a_fault_of_the_recipe(own: Any) -> None:
    module = own("def strict(metrics):\n    return None\n")
    with pytest.raises(ConfigError, match=rf"guards.rules\[0\]: {module} has no function 'stict'; did you"):
        made(f"{module}:stict")
    with pytest.raises(ConfigError, match=r"guards.rules\[0\]: cannot import 'no_such_module'"):
        made("no_such_module:rule")


def test_every_kind_and_action_is_a_word_of_the_design() -> None:
    assert list(KINDS) == ["above", "below", "rises", "falls", "flat", "not_finite"]
    assert {*Action} - {Action.CONTINUE} == {*ACTIONS} - {"alert", "rollback_to_best"}
