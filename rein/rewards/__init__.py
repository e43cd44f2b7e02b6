"""Rewards: trajectories in, one number each out. The table of those that come with Rein, and how a recipe's
list becomes one.

A reward is a function of keyword options that returns what scores rows. Two parameters are filled in here:
`scorer` gets the reward model, `inner` the reward that option `of` (with `options`) names. `"pkg.mod:name"`
is the user's function. Imports no torch.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rein.config.recipe import RewardSpec
from rein.errors import ConfigError
from rein.protocols import Reward, Scorer
from rein.rewards.code import code
from rein.rewards.learned import model
from rein.rewards.math import exact, math
from rein.rewards.mix import Mix, Part, part_metrics
from rein.rewards.noise import noisy
from rein.rewards.rules import format, length
from rein.rewards.user import user_reward
from rein.tables import lookup, nearest

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

__all__ = ["REWARDS", "Mix", "build", "part_metrics", "uses_model"]


def build(specs: Sequence[RewardSpec], *, scorer: Scorer | None) -> Mix:
    """The weighted mix that a recipe's reward list names.

    Raises ConfigError for an unknown name, a wrong option, or `model` without a reward model.
    """
    parts: list[Part] = []
    for spec in specs:
        repeats = sum(part.name.partition("#")[0] == spec.name for part in parts)
        name = f"{spec.name}#{repeats + 1}" if repeats else spec.name
        parts.append(Part(name, spec.weight, _build_one(spec.name, spec.options, scorer)))
    return Mix(parts)


def uses_model(specs: Sequence[RewardSpec]) -> bool:
    """Whether any of the rewards, or one wrapped in another, is the reward model."""
    return any("model" in (spec.name, spec.options.get("of")) for spec in specs)


def _build_one(name: str, options: dict[str, Any], scorer: Scorer | None) -> Reward:
    found: Callable[..., Any] = lookup(REWARDS, name, "reward")
    if name not in REWARDS:
        return user_reward(name, found, options)
    parameters = inspect.signature(found).parameters
    given, filled = dict(options), dict[str, Any]()
    if "scorer" in parameters:
        if scorer is None:
            raise ConfigError(
                f"reward {name}: there is no reward model here; give score.path, or use another reward"
            )
        filled["scorer"] = scorer
    if "inner" in parameters:
        if "of" not in given:
            raise ConfigError(
                f"reward {name}: options.of is missing; name the reward it wraps, as in of: gsm8k"
            )
        of = _checked(name, "of", given.pop("of"), str)
        filled["inner"] = _build_one(of, _checked(name, "options", given.pop("options", {}), dict), scorer)
    settable = {key: value for key, value in parameters.items() if key not in filled}
    for option, value in given.items():
        if option not in settable:
            raise ConfigError(f"reward {name}: option {option!r} is unknown; {nearest(option, settable)}")
        _checked(name, option, value, settable[option].annotation)
    missing = [key for key, need in settable.items() if need.default is need.empty and key not in given]
    if missing:
        raise ConfigError(f"reward {name}: option {missing[0]!r} is missing; give it under options")
    reward: Reward = found(**given, **filled)
    return reward


def _checked(name: str, option: str, value: Any, kind: Any) -> Any:
    """The value, where it is of the option's type. Raises ConfigError: true is no number, nor is infinity."""
    try:
        return TypeAdapter(kind, config=_STRICT).validate_python(value)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"reward {name}: option {option}={value!r}: {said}; correct it") from error


REWARDS: dict[str, Callable[..., Reward]] = {
    "gsm8k": exact,  # the number after ####
    "exact": exact,  # the number after `marker`
    "math": math,  # \boxed{} or the last number, by math-verify
    "code": code,  # the row's own tests
    "format": format,  # a regular expression matches
    "length": length,  # tokens over a target
    "model": model,  # a reward model
    "noisy": noisy,  # another reward that accepts some wrong answers
}
