"""The guards of a recipe, made ready: the `guards` section in, the preset's rules and the recipe's own out.

The presets are files beside this one, written as a recipe's rules are. Knows no run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rein.config.guards import Rule
from rein.config.recipe import Guards
from rein.errors import ConfigError
from rein.guards.rules import KINDS, NotFinite, RuleGuard, remedies_of, tests_of
from rein.guards.user import UserRule
from rein.protocols import Guard
from rein.tables import load_object

KL = "probe/kl_reference"
EXPLAINED = "critic/vf_explained_var"
NOT_FINITE = "not_finite"  # of any loss or gradient: always skipped, this rule of a preset adds remedies
ANY_UPDATE = Rule.model_validate({"name": NOT_FINITE, "metric": "*", "not_finite": True})

INSTEAD = {  # offline these describe the file: what to watch in their place
    "critic/score/*": "val/score",
    "critic/rewards/*": "val/score",
    "response_length/*": "val/response_length",
}
TOO_LATE = (  # of a batch, a probe or a validation: there is no update that could be skipped
    *("probe/*", "val/*", "kl/behavior", "kl/reference*", "rollout_corr/*", "training/*", "shaping/*"),
    *("actor/reward_kl_*", "critic/advantages/*", "critic/values/*", "critic/returns/*", EXPLAINED),
)


def preset(name: str) -> list[dict[str, Any]]:
    """The rules of cautious, standard or off."""
    if name == "off":
        return []
    text = (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    rules: list[dict[str, Any]] = yaml.safe_load(text)
    return rules


def guards_of(guards: Guards) -> list[Guard]:
    """The guards of a recipe, with nothing read yet.

    Raises ConfigError for a rule without a test or with two, an unknown function, a metric that cannot move,
    or an action that comes too late for its metric.
    """
    named = {rule["name"]: Rule.model_validate(rule) for rule in preset(guards.preset)}
    users: list[Guard] = []
    for place, given in enumerate(guards.rules):
        where = f"guards.rules[{place}]"
        if isinstance(given, str):
            users.append(UserRule(given, load_object(given, where)))
            continue
        name = given.name or _unused(given.metric or where, named)
        own = {key: value for key in given.model_fields_set if (value := getattr(given, key)) is not None}
        if under := named.get(name):
            if any(kind in own for kind in KINDS):  # another test takes the place of the preset's
                under = under.model_copy(update=dict.fromkeys(KINDS))
            given = under.model_copy(update=own)
        named[name] = given.model_copy(update={"name": name})
        _refuse(where, named[name])
    any_update = named.pop(NOT_FINITE, None)
    first = NotFinite(guards.max_skips, remedies_of(any_update) if any_update else ())
    return [first, *(RuleGuard(rule) for rule in named.values()), *users]


def _unused(name: str, named: dict[str, Rule]) -> str:
    """A second rule on a metric gets a number behind its name."""
    return next(found for n in range(1, 10_000) if (found := name if n == 1 else f"{name} {n}") not in named)


def _refuse(where: str, rule: Rule) -> None:
    tests = [rule, *(rule.when or [])]
    for test in tests:
        given = tests_of(test)
        if test.metric is None:
            raise ConfigError(
                f"{where}: {rule.name} has no metric; write one, or the name of a rule of the preset"
            )
        if len(given) != 1:
            what = " and ".join(given) or "no limit"
            raise ConfigError(f"{where}: {test.metric} has {what}; write exactly one of {', '.join(KINDS)}")
        for pattern, instead in INSTEAD.items():
            if fnmatch.fnmatch(test.metric, pattern):
                raise ConfigError(
                    f"{where}: {test.metric} describes the stored rows and cannot move; watch {instead}"
                )
    then = rule.then or []
    if rule.name == NOT_FINITE or rule.metric == ANY_UPDATE.metric:
        actions = {step for step in then if isinstance(step, str)}
        if rule.model_copy(update={"then": None}) != ANY_UPDATE or actions - {"skip", "alert"}:
            raise ConfigError(
                f"{where}: {NOT_FINITE} reads every loss and gradient (*) and always skips; change its "
                "remedies alone, or give your rule a metric and another name"
            )
    late = any(fnmatch.fnmatch(rule.metric or "", pattern) for pattern in TOO_LATE)
    if late and ("skip" in then or {"exclude_rows": True} in then):
        raise ConfigError(
            f"{where}: {rule.metric} is not read of an update, so there is nothing to skip and no row to "
            "leave out; write rollback, or watch a metric of updates such as actor/grad_norm"
        )


def acts(guards: Sequence[Guard]) -> bool:
    """Whether any of them may ask for a rollback, so that rollback points are worth their disk."""
    return any(not isinstance(guard, NotFinite) for guard in guards)
