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
from rein.guards.rules import KINDS, NotFinite, RuleGuard, UserRule, remedies_of, tests_of
from rein.protocols import Guard
from rein.tables import load_object

KL = "probe/kl_reference"
EXPLAINED = "critic/vf_explained_var"
NOT_FINITE = "not_finite"  # of any loss or gradient: always skipped, this rule of a preset adds remedies

INSTEAD = {  # offline these describe the file: what to watch in their place
    "critic/score/*": "val/score",
    "critic/rewards/*": "val/score",
    "response_length/*": "val/response_length",
}
TOO_LATE = (  # read when the update that it could have kept out is applied
    *("probe/*", "val/*", "kl/behavior", "kl/reference*", "rollout_corr/*", "training/*"),
    *("critic/advantages/*", "critic/values/*", "critic/returns/*", "actor/reward_kl_*", EXPLAINED),
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
        name = given.name or given.metric or where
        under = named.get(name)
        own = given.model_dump(exclude_unset=True, exclude_none=True)
        if under is not None:
            if any(
                own.get(kind) is not None for kind in KINDS
            ):  # another test takes the place of the preset's
                under = under.model_copy(update=dict.fromkeys(KINDS))
            given = under.model_copy(update=own)
        elif given.name is None and given.metric is not None:
            name = _unused(name, named)
        named[name] = Rule.model_validate(given.model_dump() | {"name": name})
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
    late = any(fnmatch.fnmatch(rule.metric or "", pattern) for pattern in TOO_LATE)
    undone = [step for step in rule.then or [] if step in ("skip", "stop_epochs")]
    if late and undone:
        raise ConfigError(
            f"{where}: {rule.metric} is read after the update, which {undone[0]} cannot undo; write rollback"
        )


def most_pending(guards: Guards) -> int:
    """How many rollback points may wait for later probes at once: those that could be confirmed in time."""
    return guards.confirm_steps // max(guards.snapshot_every, 1) + 2


def acts(guards: Sequence[Guard]) -> bool:
    """Whether any of them may ask for a rollback, so that rollback points are worth their disk."""
    return any(not isinstance(guard, NotFinite) for guard in guards)
