"""What the gate is told of an evaluation that generated nothing."""

from pathlib import Path
from typing import Any

import pytest

from rein.config.recipe import Recipe
from rein.gate import decide, failed
from rein.stages.gate_facts import outcome


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
