"""What softens a run after a verdict: a name and an amount in, the new Softening out, within its bounds.

Each remedy is one line of REMEDIES. stages/train.py applies them; nothing here touches a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from rein.errors import ConfigError
from rein.tables import nearest
from rein.types import Softening

LOW, HIGH = (
    {  # the least and the most that repeated remedies come to
        "lr": 0.01,
        "critic_lr": 0.01,
        "kl_coef": 0.1,
        "token_budget": 2**-10,
    },
    {"lr": 1.0, "critic_lr": 1.0, "kl_coef": 20.0, "token_budget": 1.0},
)
MOST_EXTRA_EPOCHS = 4
BOUNDS = {
    "kl_coef_at": (0.0, 10.0),
    "entropy_coeff": (0.0, 0.1),
    "grad_clip": (0.05, 100.0),
    "temperature": (0.2, 2.0),
}

Remedy = Callable[[Softening, str, Any], Softening]


def scaled(soft: Softening, name: str, factor: Any) -> Softening:
    """Multiply by `factor`, between LOW and HIGH in all."""
    _number(name, factor, 0.0, 100.0)
    changes: dict[str, Any] = {name: min(max(getattr(soft, name) * factor, LOW[name]), HIGH[name])}
    return replace(soft, **changes)


def fixed(soft: Softening, name: str, value: Any) -> Softening:
    """Set to `value`."""
    _number(name, value, *BOUNDS[name])
    changes: dict[str, Any] = {name: float(value)}
    return replace(soft, **changes)


def lowered(soft: Softening, name: str, value: Any) -> Softening:
    """Set to `value`, or leave it where it is lower."""
    _number(name, value, *BOUNDS[name])
    changes: dict[str, Any] = {name: min(float(value), getattr(soft, name) or math.inf)}
    return replace(soft, **changes)


def more_epochs(soft: Softening, name: str, count: Any) -> Softening:
    """So many PPO epochs more (or fewer), at most MOST_EXTRA_EPOCHS away from the recipe's."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < abs(count) <= MOST_EXTRA_EPOCHS:
        raise ConfigError(f"guards: ppo_epochs {count}; write a whole number, 1 for one epoch more")
    total = soft.ppo_epochs + count
    return replace(soft, ppo_epochs=min(max(total, -MOST_EXTRA_EPOCHS), MOST_EXTRA_EPOCHS))


def clipped(soft: Softening, name: str, ends: Any) -> Softening:
    """Clip scores to these ends from the next batch on."""
    numbers = isinstance(ends, list | tuple) and all(type(end) in (int, float) for end in ends)
    if not (numbers and len(ends) == 2 and ends[0] < ends[1]):
        raise ConfigError(f"guards: reward_clip {ends}; write two numbers, [-2, 2]")
    return replace(soft, reward_clip=(float(ends[0]), float(ends[1])))


def excluded(soft: Softening, name: str, yes: Any) -> Softening:
    """The update's rows are left out from now on; who keeps their keys does it, and nothing changes here."""
    if yes is not True:
        raise ConfigError("guards: exclude_rows takes true; leave it out otherwise")
    return soft


REMEDIES: dict[str, Remedy] = {
    "lr": scaled,
    "critic_lr": scaled,
    "kl_coef": scaled,
    "kl_coef_at": fixed,
    "entropy_coeff": fixed,
    "grad_clip": lowered,
    "temperature": fixed,
    "ppo_epochs": more_epochs,
    "token_budget": scaled,
    "reward_clip": clipped,
    "exclude_rows": excluded,
}


def soften(soft: Softening, remedies: Sequence[tuple[str, Any]]) -> Softening:
    """Apply remedies in order. Raises ConfigError for an unknown one and an amount that makes no sense."""
    for name, amount in remedies:
        if name not in REMEDIES:
            raise ConfigError(f"guards: {name!r} is no remedy; {nearest(name, REMEDIES)}")
        soft = REMEDIES[name](soft, name, amount)
    return soft


def relaxed(soft: Softening) -> Softening:
    """Half the way back (of a factor, its root); what is nearly back, or has no half, goes wholly back.

    The token budget stays: memory has not grown. So does the reward clip: the rewards are the same.
    """
    changes: dict[str, Any] = {}
    for name in ("lr", "critic_lr", "kl_coef"):
        root = math.sqrt(getattr(soft, name))
        changes[name] = 1.0 if 0.9 < root < 1.1 else root
    kept = Softening()
    changes |= {
        name: getattr(kept, name) for name in ("kl_coef_at", "entropy_coeff", "grad_clip", "temperature")
    }
    return replace(soft, **changes, ppo_epochs=0)


def changed(before: Softening, after: Softening) -> dict[str, list[Any]]:
    """What differs: name -> [before, after]."""
    names = [field.name for field in fields(Softening)]
    pairs = {name: [getattr(before, name), getattr(after, name)] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def in_words(soft: Softening) -> str:
    """What differs from the recipe: `lr x0.5, grad_clip 0.1`."""
    said = []
    for name, (_, now) in changed(Softening(), soft).items():
        value = f"{now:.4g}" if isinstance(now, float) else str(now)
        said.append(f"{name} x{value}" if name in LOW else f"{name} {value}")
    return ", ".join(said)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"guards: {name} {value}; write a number between {low:g} and {high:g}")
