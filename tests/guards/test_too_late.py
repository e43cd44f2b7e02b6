"""What is read after the update cannot keep it out: such a rule is refused by name."""

import pytest

from rein.config.recipe import Guards
from rein.errors import ConfigError
from rein.guards.presets import guards_of

AFTER = ("probe/entropy", "val/score", "kl/behavior", "rollout_corr/raw_ess", "critic/vf_explained_var")
BEFORE = ("actor/grad_norm", "actor/ppo_kl", "kl/old", "critic/vf_loss")


def guards(metric: str, action: str) -> Guards:
    return Guards.model_validate({"rules": [{"metric": metric, "above": 1, "then": action}]})


@pytest.mark.parametrize("metric", AFTER)
def test_what_is_applied_cannot_be_skipped_but_the_rest_of_the_batch_can(metric: str) -> None:
    with pytest.raises(ConfigError, match=f"{metric} is not read of an update, so there is nothing to skip"):
        guards_of(guards(metric, "skip"))
    guards_of(guards(metric, "stop_epochs"))


@pytest.mark.parametrize("metric", BEFORE)
def test_what_is_not_applied_yet_can(metric: str) -> None:
    guards_of(guards(metric, "skip"))
