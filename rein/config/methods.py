"""What `algorithm.method` and a correction preset stand for, and what estimators and losses ask of the data.

A method is a few keys of the recipe that hold where the recipe does not give them itself (`beneath`). Imports
no torch, so that a recipe is checked without it; tests hold these tables against those of functional/.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from rein.config.recipe import Recipe
from rein.functional.presets import PRESETS

LOSS, ESTIMATOR = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"
CORRECTION = "algorithm.rollout_correction"
METHOD, AUTO = "algorithm.method", "auto"
_IMITATION = {LOSS: "nll", ESTIMATOR: None, "actor.use_kl_loss": False}

METHODS: Final[dict[str, Mapping[str, Any]]] = {
    "auto": {},  # what an audit of the rows says
    "ppo": {},
    "grpo": {ESTIMATOR: "grpo"},
    "topr": {LOSS: "topr", ESTIMATOR: "reinforce_plus_plus"},
    "awr": {LOSS: "awr"},
    "m2po": {LOSS: "m2po"},
    "sppo": {LOSS: "sppo", ESTIMATOR: "win_rate", "actor.use_kl_loss": False},
    "dpo": {LOSS: "dpo", ESTIMATOR: None, "actor.use_kl_loss": False},
    "bc": _IMITATION,
    "filtered_bc": {**_IMITATION, "algorithm.filter_threshold": 1.0},
}
_PER_ROW = {"actor.loss_agg_mode": "seq-mean-token-mean"}
_UNWEIGHTED = {f"{CORRECTION}.rollout_is": None}
# What a loss sets, however it was chosen: the aggregation it was made for, and no second weight.
LOSS_DEFAULTS: Final[dict[str, Mapping[str, Any]]] = {
    **dict.fromkeys(("gspo", "geo_mean", "sapo"), _PER_ROW),
    **dict.fromkeys(("topr", "m2po", "awr", "nll", "dpo"), _UNWEIGHTED),
    "sppo": {**_PER_ROW, **_UNWEIGHTED},
}
OWN_DENOMINATOR: Final = ("topr", "m2po", "dpo")  # weights of old / behavior on top would count them twice
ONLY_PER_ROW: Final = ("geo_mean", "sppo")  # right in no other aggregation

# What must be there: a critic, or in the data: behavior log-probs, several responses to a prompt
# (groups), a baseline_score, better and worse responses (pairs); reference: log-probs of the start policy.
ESTIMATORS: Final[dict[str, frozenset[str]]] = {
    "gae": frozenset({"critic"}),
    "vtrace": frozenset({"critic", "behavior"}),
    "monte_carlo": frozenset({"critic"}),
    "grpo": frozenset({"groups"}),
    "rloo": frozenset({"groups"}),
    "reinforce_plus_plus": frozenset(),
    "reinforce_plus_plus_baseline": frozenset({"groups"}),
    "remax": frozenset({"baseline_score"}),
    "opo": frozenset({"groups"}),
    "win_rate": frozenset({"groups"}),
}
LOSSES: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(("ppo_clip", "vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dro"), frozenset()),
    **dict.fromkeys(("dppo_tv", "dppo_kl", "awr", "nll"), frozenset()),
    **dict.fromkeys(("topr", "m2po"), frozenset({"behavior"})),
    "sppo": frozenset({"reference"}),
    "dpo": frozenset({"reference", "pairs"}),
}
READ_NO_ADVANTAGES: Final = ("nll", "dpo")
DATA_NEEDS: Final = {
    "behavior": "behavior_log_probs in every row",
    "groups": "two or more scored responses to a prompt",
    "baseline_score": "baseline_score in every row",
    "pairs": "two responses to a prompt that score differently",
}


def beneath(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys that method, preset and loss set beneath the `given` ones; notes of what overrides them."""
    method, preset = given.get("algorithm.method", "ppo"), given.get(f"{CORRECTION}.preset")
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if isinstance(preset, str) and preset in PRESETS:
        fields = {f"{CORRECTION}.{name}": value for name, value in asdict(PRESETS[preset]).items()}
        layers.append((f"{CORRECTION}.preset {preset}", fields))
    if isinstance(method, str) and method in METHODS:
        layers.append((f"algorithm.method {method}", METHODS[method]))
    loss = given.get(LOSS, METHODS.get(str(method), {}).get(LOSS))
    if loss in LOSS_DEFAULTS:
        layers.append((f"{LOSS} {loss}", LOSS_DEFAULTS[loss]))
    found: dict[str, Any] = {}
    notes = []
    for name, keys in layers:
        for key, value in keys.items():
            held = given.get(key, value) if key in given else found.setdefault(key, value)
            if held != value:
                notes.append(f"{name} sets {key} {_word(value)}; {_word(held)} is given and holds")
    return found, notes


def needs(recipe: Recipe) -> frozenset[str]:
    """Of critic, reference and DATA_NEEDS, what this recipe's training cannot do without."""
    return frozenset(asked_by(recipe))


def asked_by(recipe: Recipe) -> dict[str, list[str]]:
    """What the training needs, and the keys that ask for it: behavior -> actor.policy_loss.loss_mode=topr."""
    actor, algorithm = recipe.actor, recipe.algorithm
    loss, correction, estimator = actor.policy_loss, algorithm.rollout_correction, algorithm.adv_estimator
    asking: list[tuple[str, Any, Iterable[str]]] = [
        (LOSS, loss.loss_mode, LOSSES[loss.loss_mode]),
        (ESTIMATOR, estimator, ESTIMATORS[estimator] if estimator else ()),
        ("algorithm.filter_groups.enable", True, {"groups"} if algorithm.filter_groups.enable else ()),
        ("actor.use_kl_loss", True, {"reference"} if actor.use_kl_loss else ()),
        ("algorithm.use_kl_in_reward", True, {"reference"} if algorithm.use_kl_in_reward else ()),
    ]
    kind = actor.kl_loss_type if actor.use_kl_loss else None
    weighing = {
        f"{CORRECTION}.rollout_is": None if correction.rollout_is == "auto" else correction.rollout_is,
        f"{CORRECTION}.rollout_rs": correction.rollout_rs or None,
        f"{CORRECTION}.bypass_mode": correction.bypass_mode or None,
        "actor.policy_loss.opsm_threshold": loss.opsm_threshold,
        "actor.kl_loss_type": kind if kind == "off_policy" else None,
    }
    asking += [(key, value, {"behavior"}) for key, value in weighing.items() if value is not None]
    found: dict[str, list[str]] = {}
    for key, value, wanted in asking:
        for need in wanted:
            found.setdefault(need, []).append(f"{key}={_word(value)}")
    return found


def reads_scores(recipe: Recipe) -> bool:
    """Whether training looks at scores at all: imitating every row does not."""
    algorithm = recipe.algorithm
    filters = algorithm.filter_threshold is not None or algorithm.filter_groups.enable
    return algorithm.adv_estimator is not None or filters or "pairs" in needs(recipe)


def methods_for(has: frozenset[str]) -> list[str]:
    """The methods that data with these of DATA_NEEDS can serve."""
    return [name for name in METHODS if name != AUTO and method_needs(name) <= has]


def method_needs(name: str) -> frozenset[str]:
    """What a method, as it stands in the table, asks of the data."""
    keys = METHODS[name]
    estimator = keys.get(ESTIMATOR, "gae")
    found = LOSSES[keys.get(LOSS, "ppo_clip")] | (ESTIMATORS[estimator] if estimator else frozenset())
    return found & frozenset(DATA_NEEDS)


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
