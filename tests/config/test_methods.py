"""What a method stands for, what it asks of data, and that the recipe's names are those of the maths."""

from typing import get_args

import pytest

from rein.config import methods, names
from rein.config.load import load, resolved
from rein.config.methods import CORRECTION, DATA_NEEDS, METHODS, asked_by, methods_for, needs
from rein.errors import ConfigError
from rein.functional.advantages import ESTIMATORS, INPUTS
from rein.functional.kl import EXACT_KINDS, KINDS, OFF_POLICY
from rein.functional.losses.aggregate import MODES
from rein.functional.losses.dpo import PAIR_LOSSES
from rein.functional.losses.table import LOSSES
from rein.functional.presets import PRESETS

INPUT_OF = {
    "critic": "values",
    "behavior": "behavior_log_probs",
    "groups": "groups",
    "baseline_score": "baseline_scores",
}


def test_a_recipe_s_names_are_those_of_the_tables() -> None:
    assert set(get_args(names.LossMode)) == set(LOSSES) | set(PAIR_LOSSES) == set(methods.LOSSES)
    assert set(get_args(names.Estimator)) == set(ESTIMATORS) == set(methods.ESTIMATORS)
    assert set(get_args(names.MethodName)) == set(METHODS)
    assert set(get_args(names.Preset)) == set(PRESETS)
    assert set(get_args(names.KlKind)) == set(KINDS) | set(EXACT_KINDS)
    loss_kinds = [kind for some in get_args(names.KlLossKind) for kind in get_args(some)]
    assert set(loss_kinds) == set(KINDS) | set(EXACT_KINDS) | {OFF_POLICY}
    assert set(get_args(names.LossAggMode)) == set(MODES)


def test_an_estimator_needs_what_it_reads() -> None:
    for name, inputs in INPUTS.items():
        assert methods.ESTIMATORS[name] == {need for need, read in INPUT_OF.items() if read in inputs}, name


def test_a_loss_that_is_made_for_rows_is_given_its_aggregation() -> None:
    for name, loss in LOSSES.items():
        assert methods.LOSS_DEFAULTS.get(name, {}).get("actor.loss_agg_mode") == loss.aggregate, name


@pytest.mark.parametrize("name", METHODS)
def test_a_method_sets_its_keys_and_the_resolved_recipe_says_the_same(name: str) -> None:
    recipe, notes = load(None, [f"algorithm.method={name}"])
    assert notes == []
    flat = resolved(recipe)
    for key, value in METHODS[name].items():
        found = flat
        for part in key.split("."):
            found = found[part]
        assert found == value, key


def test_a_key_that_is_given_holds_over_the_method_and_is_said() -> None:
    recipe, notes = load(None, ["algorithm.method=topr", "algorithm.adv_estimator=gae"])
    assert recipe.algorithm.adv_estimator == "gae"
    assert notes == [
        "algorithm.method topr sets algorithm.adv_estimator reinforce_plus_plus; gae is given and holds"
    ]


def test_a_preset_sets_verl_s_fields() -> None:
    name = "algorithm.rollout_correction"
    recipe, _ = load(None, [f"{name}.preset=decoupled_geo_rs_token_tis", f"{name}.rollout_is_threshold=3"])
    found = recipe.algorithm.rollout_correction
    assert (found.rollout_is, found.rollout_is_threshold) == ("token", 3.0)
    assert (found.rollout_rs, found.rollout_rs_threshold) == ("seq_mean_k1", "0.999_1.001")
    assert needs(recipe) == {"critic", "behavior", "reference"}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", {"critic", "reference"}),
        ("actor.use_kl_loss=false", {"critic"}),
        ("algorithm.method=grpo actor.use_kl_loss=false", {"groups"}),
        ("algorithm.method=awr", {"critic", "reference"}),
        ("algorithm.method=topr actor.use_kl_loss=false", {"behavior"}),
        ("algorithm.method=dpo", {"pairs", "reference"}),
        ("algorithm.method=bc", set()),
        ("algorithm.adv_estimator=vtrace", {"critic", "behavior", "reference"}),
        ("algorithm.adv_estimator=remax", {"baseline_score", "reference"}),
        ("algorithm.rollout_correction.bypass_mode=true", {"critic", "behavior", "reference"}),
        ("actor.policy_loss.opsm_threshold=0.1", {"critic", "behavior", "reference"}),
    ],
)
def test_a_recipe_needs(words: str, wanted: set[str]) -> None:
    assert needs(load(None, words.split())[0]) == wanted


@pytest.mark.parametrize(
    ("words", "need", "keys"),
    [
        ("actor.kl_loss_type=off_policy", "behavior", ["actor.kl_loss_type=off_policy"]),
        ("actor.kl_loss_type=off_policy actor.use_kl_loss=false", "behavior", []),
        (f"{CORRECTION}.rollout_is=token", "behavior", [f"{CORRECTION}.rollout_is=token"]),
        (f"{CORRECTION}.rollout_is=auto", "behavior", []),
        (f"{CORRECTION}.bypass_mode=true", "behavior", [f"{CORRECTION}.bypass_mode=true"]),
        (
            "algorithm.method=m2po actor.policy_loss.opsm_threshold=0.5",
            "behavior",
            ["actor.policy_loss.loss_mode=m2po", "actor.policy_loss.opsm_threshold=0.5"],
        ),
        ("algorithm.adv_estimator=vtrace", "behavior", ["algorithm.adv_estimator=vtrace"]),
        (
            "algorithm.method=grpo algorithm.filter_groups.enable=true",
            "groups",
            ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"],
        ),
        ("algorithm.method=dpo", "pairs", ["actor.policy_loss.loss_mode=dpo"]),
    ],
)
def test_the_keys_that_ask_for_data_are_known(words: str, need: str, keys: list[str]) -> None:
    assert asked_by(load(None, words.split())[0]).get(need, []) == keys


def test_the_methods_that_data_can_serve() -> None:
    assert methods_for(frozenset()) == ["ppo", "awr", "bc", "filtered_bc"]
    assert methods_for(frozenset({"behavior"})) == ["ppo", "topr", "awr", "m2po", "bc", "filtered_bc"]
    assert methods_for(frozenset(DATA_NEEDS)) == [name for name in METHODS if name != "auto"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algorithm.adv_estimator=null", "ppo_clip weighs tokens by advantages"),
        ("actor.policy_loss.loss_mode=dro", "dro needs it"),
        ("algorithm.method=sppo actor.loss_agg_mode=token-mean", "write seq-mean-token-mean"),
        ("algorithm.method=dpo actor.use_kl_loss=true", "dpo holds to the reference by itself"),
        ("algorithm.method=dpo actor.ppo_mini_batch_size=5", "write an even size"),
        ("algorithm.rollout_correction.rollout_rs=seq_mean_k4", "unknown; known"),
        ("algorithm.rollout_correction.rollout_rs_threshold=2", "needs rollout_rs"),
        ("algorithm.rollout_correction.bypass_mode=true actor.policy_loss.loss_mode=gspo", "denominator"),
        ("algorithm.rollout_correction.rollout_is_threshold=0", "must be positive"),
        ("algorithm.rollout_correction.rollout_is_threshold=abc", "no number"),
        ("algorithm.adv_estimator=vtrace algorithm.rollout_correction.rollout_is=sequence", "of tokens"),
    ],
)
def test_what_contradicts_itself_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + said.replace("(", r"\(")):
        load(None, words.split())
