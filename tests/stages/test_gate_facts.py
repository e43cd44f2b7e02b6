"""What the gate is told, and of which evaluation: one that generated nothing, one of other models."""

import json
from pathlib import Path
from typing import Any

import pytest

from rein import manifest
from rein.config.recipe import Recipe
from rein.gate import decide, failed
from rein.stages.gate_facts import evaluation_of, outcome


def by_stored_rows(*, trust: bool) -> dict[str, Any]:
    """As off_policy_evaluation.compare writes it."""
    estimates = {"control_variate": {"score": 0.6, "ci95": [0.55, 0.65]}}
    return {
        "generated": False,
        "off_policy": {
            "after": {"estimates": estimates},
            "difference": {"control_variate": {"score": 0.2, "ci95": [0.1, 0.3]}},
            "trust": trust,
            "reported": "control_variate",
            "prompts": 300,
        },
    }


@pytest.mark.parametrize("trust", [True, False])
def test_what_stored_rows_tell_counts_where_it_can_be_trusted(tmp_path: Path, trust: bool) -> None:
    gate = {"min_score": 0.5, "max_kl": None, "max_length_ratio": None, "max_format_drop": None}
    gate |= {"max_repetition": None, "require_no_guard_stop": False}
    recipe = Recipe.model_validate({"out": str(tmp_path), "gate": gate})
    found = outcome(recipe, str(tmp_path / "model"), by_stored_rows(trust=trust))
    assert (found.score, found.lift, found.lift_low) == ((0.6, 0.2, 0.1) if trust else (None, None, None))
    assert found.prompts == 300
    unknown = {line.check for line in failed(decide(recipe.gate, found))}
    assert unknown == (set() if trust else {"min_score", "min_lift_low"})


PROXY = {"score": {"reward": "length"}, "evaluate": {"reward": "exact"}}


def test_stored_scores_are_the_proxys_where_the_truth_is_another(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"out": str(tmp_path), "gate": {"min_score": 0.5}, **PROXY})
    found = outcome(recipe, str(tmp_path / "model"), by_stored_rows(trust=True))
    assert (found.score, found.lift, found.lift_low, found.prompts) == (None, None, None, 300)
    lines = {line.check: line for line in decide(recipe.gate, found)}
    assert not lines["min_score"].passed
    assert not lines["min_lift_low"].passed
    assert "is not known" in lines["proxy_agrees"].why


def test_a_proxy_that_judged_nothing_is_no_pass(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"out": str(tmp_path), **PROXY})
    evaluation = {"lift": 0.2, "lift_ci95": [0.1, 0.3], "n": 300, "before": {}, "after": {"score": 0.9}}
    found = outcome(recipe, str(tmp_path / "model"), evaluation)
    assert "proxy_agrees" in {line.check for line in failed(decide(recipe.gate, found))}
    recipe = Recipe.model_validate({"out": str(tmp_path)})
    found = outcome(recipe, str(tmp_path / "model"), evaluation)
    assert "proxy_agrees" not in {line.check for line in decide(recipe.gate, found)}


def evaluated(folder: Path, **models: str) -> dict[str, Any]:
    """An evaluation of these models, with its manifest; the settings of its recipe."""
    for name in ("start", "trained", "other"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_text(name)
    settings: dict[str, Any] = {"out": str(folder), "model": {"path": str(folder / "start")}}
    settings["evaluate"] = {"reward": "exact"}
    (folder / "evaluate").mkdir()
    (folder / "evaluate" / "evaluation.json").write_text(json.dumps({"models": models, "reward": ["exact"]}))
    recipe = Recipe.model_validate(settings)
    inputs = list(models.values())
    where = folder / "evaluate"
    manifest.write(where, stage="evaluate", recipe=recipe, inputs=inputs, rows={}, facts={}, seconds=0.0)
    return settings


def test_only_an_evaluation_as_the_recipe_asks_counts(tmp_path: Path) -> None:
    start, trained, other = (str(tmp_path / name) for name in ("start", "trained", "other"))
    asked = evaluated(tmp_path, before=start, after=trained)
    assert evaluation_of(Recipe.model_validate(asked), trained) is not None
    assert evaluation_of(Recipe.model_validate(asked), other) is None
    for changed in (
        {"model": {"path": other}},
        {"evaluate": {"reward": "exact", "before": other}},
        {"evaluate": {"reward": "length"}},
    ):
        assert evaluation_of(Recipe.model_validate(asked | changed), trained) is None
    assert evaluation_of(Recipe.model_validate(asked | {"model": {}}), trained) is not None


def test_a_hubs_name_is_no_model_that_was_judged(tmp_path: Path) -> None:
    asked = evaluated(tmp_path, before="org/start", after="org/trained")
    asked["model"] = {"path": "org/start"}
    assert evaluation_of(Recipe.model_validate(asked), "org/trained") is None
    assert evaluation_of(Recipe.model_validate(asked), "org/other") is None


def test_a_start_may_have_a_hubs_name(tmp_path: Path) -> None:
    trained = str(tmp_path / "trained")
    asked = evaluated(tmp_path, before="org/start", after=trained)
    for name, counts in (("org/start", True), ("org/other", False)):
        recipe = Recipe.model_validate(asked | {"model": {"path": name}})
        assert (evaluation_of(recipe, trained) is not None) == counts
