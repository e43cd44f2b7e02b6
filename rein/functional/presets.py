"""The names of off-policy correction: levels, rejection rules, thresholds and presets, as verl spells them.

Plain data and parsing, so that a recipe is checked without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

LEVELS = ("token", "sequence", "geometric")
REJECTIONS = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)
LOSS_TYPES = ("ppo_clip", "reinforce")
SMALLEST, LARGEST = 1e-30, 1e30  # bounds that float32 holds, and so does 1 / bound


@dataclass(frozen=True, slots=True)
class Correction:
    """What is done about rho = old / behavior: weights, rejection, and whether old is behavior (bypass)."""

    rollout_is: str | None = None  # an entry of LEVELS; None: no weights
    rollout_is_threshold: float | str = 2.0  # u: min(w, u); "lo_hi": 0 outside
    rollout_is_batch_normalize: bool = False  # divide by the batch's mean weight
    rollout_rs: str | None = None  # entries of REJECTIONS, separated by commas; all must hold
    rollout_rs_threshold: float | str | None = None  # one for all, or one for each
    bypass_mode: bool = False  # two policies: the ratio's denominator is behavior
    loss_type: str = "ppo_clip"  # in bypass mode: an entry of LOSS_TYPES


NONE = Correction()
TOKEN = Correction(rollout_is="token")
SEQUENCE = Correction(rollout_is="sequence")
ICEPOP = Correction(rollout_is="token", rollout_is_threshold="0.5_5.0")
GEO = Correction(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001")
K3 = Correction(rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)


def _bypass(correction: Correction, loss_type: str) -> Correction:
    return replace(correction, bypass_mode=True, loss_type=loss_type)


PRESETS: dict[str, Correction] = {
    "disabled": NONE,
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_token_icepop": ICEPOP,
    "decoupled_seq_is_rs": replace(SEQUENCE, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
    "decoupled_geo_rs": GEO,
    "decoupled_geo_rs_seq_tis": replace(GEO, rollout_is="sequence"),
    "decoupled_geo_rs_token_tis": replace(GEO, rollout_is="token"),
    "decoupled_k3_rs": K3,
    "decoupled_k3_rs_seq_tis": replace(K3, rollout_is="sequence"),
    "decoupled_k3_rs_token_tis": replace(K3, rollout_is="token"),
    "bypass_ppo_clip": _bypass(NONE, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": _bypass(GEO, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": _bypass(K3, "ppo_clip"),
    "bypass_pg_is": _bypass(SEQUENCE, "reinforce"),
    "bypass_pg_token_icepop": _bypass(ICEPOP, "reinforce"),
    "bypass_pg_geo_rs": _bypass(GEO, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": _bypass(replace(GEO, rollout_is="sequence"), "reinforce"),
    "bypass_pg_geo_rs_token_tis": _bypass(replace(GEO, rollout_is="token"), "reinforce"),
}


def weight_bounds(threshold: float | str) -> tuple[float | None, float]:
    """`u` -> (None, u): weights are cut at u. `"lo_hi"` -> (lo, hi): those outside are 0 (IcePop).

    Raises ValueError for anything else, and for bounds that are not positive, not finite or out of order.
    """
    return _interval(threshold, "rollout_is_threshold")


def rejection_bounds(names: str, threshold: float | str | None) -> dict[str, tuple[float | None, float]]:
    """`"token_k1,seq_mean_k3"`, `"0.5_2.0,0.1"` -> each rule's (low, high), a repeated rule once.

    k1 rules take bounds of a ratio, "lo_hi", or u for (1/u, u); k2 and k3 rules an upper bound only. One
    threshold serves all rules. Raises ValueError for an unknown rule, a missing threshold or one that does
    not fit its rule.
    """
    rules = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in rules:
        if name not in REJECTIONS:
            raise ValueError(f"rollout_rs: {name!r} is unknown; known: {', '.join(REJECTIONS)}")
    given = [] if threshold is None else [part.strip() for part in str(threshold).split(",") if part.strip()]
    if not rules or len(given) not in (1, len(rules)):
        raise ValueError(
            f"rollout_rs_threshold: {len(given)} thresholds for the {len(rules)} rules of "
            f"rollout_rs {names!r}; give one, or one for each"
        )
    return dict(_bounds_of(rules, given * (len(rules) if len(given) == 1 else 1)))


def _bounds_of(rules: list[str], given: list[str]) -> Iterator[tuple[str, tuple[float | None, float]]]:
    for name, spec in zip(rules, given, strict=True):
        low, high = _interval(spec, f"rollout_rs_threshold of {name}")
        if name.endswith("k1"):
            low = 1 / high if low is None else low
            if low > high:
                raise ValueError(f"rollout_rs_threshold of {name}: {spec} is an empty interval; give u >= 1")
        elif low is not None:
            raise ValueError(
                f"rollout_rs_threshold of {name}: {spec} has two bounds; give the upper one alone"
            )
        yield name, (low, high)


def _interval(threshold: float | str, where: str) -> tuple[float | None, float]:
    low, separator, high = str(threshold).strip().partition("_")
    if "_" in high:  # Python would read 2_3 as 23
        raise ValueError(f"{where}: {threshold!r} has more than two bounds; give u or lo_hi")
    try:
        ends = (float(low), float(high)) if separator else (None, float(low))
    except ValueError as error:
        raise ValueError(
            f"{where}: {threshold!r} is no number and no lo_hi, such as 2.0 or 0.5_5.0"
        ) from error
    if not SMALLEST <= (ends[1] if ends[0] is None else ends[0]) <= ends[1] <= LARGEST:
        raise ValueError(
            f"{where}: {threshold} must be positive and finite ({SMALLEST:g} to {LARGEST:g}), its lower end "
            "not above the upper"
        )
    return ends
