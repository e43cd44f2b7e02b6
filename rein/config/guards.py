"""The rules of a recipe's `guards` section: what is watched and what is done about it.

A rule is one test of one metric with what follows. `guards.preset` brings rules of its own; one written here
with a preset's name changes just the keys it gives. Knows no metric's meaning (guards/presets.py).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rein.config.values import Count, Positive, as_list

ACTIONS = ("alert", "skip", "stop_epochs", "rollback", "rollback_to_best", "refresh", "pause", "stop")
REMEDIES = (
    *("lr", "critic_lr", "kl_coef", "kl_coef_at", "entropy_coeff", "grad_clip"),
    *("temperature", "ppo_epochs", "token_budget", "reward_clip", "exclude_rows"),
)
Then = str | dict[str, Any]


def _then_ok(steps: list[Then]) -> list[Then]:
    """Names only, and at most one action; values are for remedies.py to bound."""
    for step in steps:
        known = REMEDIES if isinstance(step, dict) else ACTIONS
        names = list(step) if isinstance(step, dict) else [step]
        if len(names) != 1:
            raise ValueError(f"{step} is not one remedy; write [{{lr: 0.5}}, {{kl_coef: 1.5}}]")
        if names[0] not in known:
            kind = "remedy" if isinstance(step, dict) else "action"
            close = get_close_matches(names[0], known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"{names[0]} is no {kind}; {hint}")
    actions = [step for step in steps if isinstance(step, str) and step != "alert"]
    if len(actions) > 1:
        raise ValueError(f"then has {' and '.join(actions)}; write one of them")
    return steps


class Condition(BaseModel):
    """One metric held against one limit. Exactly one of above, below, rises, falls, flat, not_finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    metric: str | None = None
    above: float | None = None  # value > above (times the baseline, with `against`)
    below: float | None = None
    rises: float | None = None  # value - baseline > rises; baseline: the first reading, or `against`
    falls: float | None = None  # baseline - value > falls
    flat: float | None = None  # largest - smallest of the last `window` readings <= flat
    not_finite: bool | None = None
    of: Literal["value", "mean", "std", "start"] | None = None  # of the last `window`, or the first reading
    window: Annotated[int, Field(ge=2, le=1000)] | None = None  # default: 5
    # What the limit is relative to: the run's first reading, the mean of the last `window`, the best so far.
    against: Literal["start", "average", "best"] | None = None


class Rule(Condition):
    """A test, how long it must hold, what else must hold, and what then."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None  # default: the metric and the limit
    patience: Positive | None = Field(None, alias="for")  # readings in a row; default: 1
    when: Annotated[list[Condition], BeforeValidator(as_list)] | None = (
        None  # each must hold too, as last read
    )
    rest: Count | None = None  # readings it is quiet for after it fired; default: 0 with skip, else 3
    then: Annotated[list[Then], BeforeValidator(as_list), AfterValidator(_then_ok)] | None = None


GuardRules = Annotated[list[Rule | str], BeforeValidator(as_list)]
