"""The gate: more than twelve kinds of made outcome, drawn from a seed, are all decided right.

An outcome is made as evaluation makes it: scores of the same prompts before and after, a bootstrap over them.
REIN_TEST_SEED=N draws others.
"""

import dataclasses
import math
import os
import random
from collections.abc import Callable

import pytest
import torch

from rein.config.recipe import Gate
from rein.functional.statistics import paired_bootstrap
from rein.gate import Outcome, decide, failed

FIRST = int(os.environ.get("REIN_TEST_SEED", "0"))
SEEDS = range(FIRST, FIRST + 40)
GATE = Gate(min_score=0.5)


def scores(rng: random.Random, n: int, share: float) -> list[float]:
    """Right or wrong, this share right."""
    found = [float(i < round(share * n)) for i in range(n)]
    rng.shuffle(found)
    return found


def judged(before: list[float], after: list[float]) -> dict[str, float | int]:
    one, other = (torch.tensor(side, dtype=torch.float64) for side in (before, after))
    low = paired_bootstrap(one, other, resamples=1000).low
    return {
        "score": float(other.mean()),
        "lift": float((other - one).mean()),
        "lift_low": low,
        "prompts": len(before),
    }


def good(rng: random.Random) -> Outcome:
    """Better by far, and nothing else changed for the worse."""
    n = rng.randint(200, 400)
    before = rng.uniform(0.35, 0.55)
    numbers = judged(scores(rng, n, before), scores(rng, n, before + rng.uniform(0.25, 0.4)))
    length = rng.uniform(10, 300)
    ended = rng.uniform(0.9, 0.99)
    return Outcome(
        **numbers,
        kl=rng.uniform(0, 0.29),
        lengths=(length, length * rng.uniform(0.6, 1.9)),
        well_formed=(ended, min(1.0, ended + rng.uniform(-0.04, 0.05))),
        repetition=(rng.uniform(0, 0.2), rng.uniform(0, 0.19)),
        has_proxy=True,
        proxy_low=rng.uniform(0.01, 0.5),
        guard_stop="",
    )


def better(rng: random.Random) -> tuple[Outcome, set[str]]:
    return good(rng), set()


def worse(rng: random.Random) -> tuple[Outcome, set[str]]:
    n = rng.randint(100, 300)
    before = rng.uniform(0.85, 0.95)
    numbers = judged(scores(rng, n, before), scores(rng, n, before - rng.uniform(0.2, 0.3)))
    return dataclasses.replace(
        good(rng),
        **numbers,
        proxy_low=-rng.uniform(0, 1),
    ), {"min_lift_low"}


def noisy(rng: random.Random) -> tuple[Outcome, set[str]]:
    """Better on these prompts by less than one standard error."""
    n = rng.randint(60, 120)
    before = [rng.gauss(0, 1) for _ in range(n)]
    noise = [rng.gauss(0, 1) for _ in range(n)]
    mean = sum(noise) / n
    spread = math.sqrt(sum((x - mean) ** 2 for x in noise) / n / n)
    gain = rng.uniform(0.1, 1) * spread
    numbers = judged(before, [b + x - mean + gain for b, x in zip(before, noise, strict=True)])
    assert numbers["lift"] > 0
    return dataclasses.replace(good(rng), **numbers | {"score": 0.6}), {"min_lift_low"}


def long_winded(rng: random.Random) -> tuple[Outcome, set[str]]:
    length = rng.uniform(5, 200)
    return dataclasses.replace(good(rng), lengths=(length, length * rng.uniform(2.01, 30))), {
        "max_length_ratio"
    }


def drifted(rng: random.Random) -> tuple[Outcome, set[str]]:
    return dataclasses.replace(good(rng), kl=rng.uniform(0.31, 20)), {"max_kl"}


def hacked(rng: random.Random) -> tuple[Outcome, set[str]]:
    """The proxy is surely up, the truth down."""
    n = rng.randint(100, 300)
    before = rng.uniform(0.8, 0.9)
    numbers = judged(scores(rng, n, before), scores(rng, n, before - rng.uniform(0.1, 0.25)))
    proxy = rng.uniform(0.01, 3)
    return dataclasses.replace(good(rng), **numbers, proxy_low=proxy), {"min_lift_low", "proxy_agrees"}


def repetitive(rng: random.Random) -> tuple[Outcome, set[str]]:
    start = rng.uniform(0, 0.3)
    return dataclasses.replace(good(rng), repetition=(start, start + rng.uniform(0.21, 0.6))), {
        "max_repetition"
    }


def format_broken(rng: random.Random) -> tuple[Outcome, set[str]]:
    start = rng.uniform(0.7, 1)
    return dataclasses.replace(good(rng), well_formed=(start, start - rng.uniform(0.06, 0.7))), {
        "max_format_drop"
    }


def guard_stopped(rng: random.Random) -> tuple[Outcome, set[str]]:
    why = f"{rng.choice(['pause', 'stop', 'refresh'])}, probe/kl_reference {rng.uniform(0.3, 2):.3g}"
    return dataclasses.replace(good(rng), guard_stop=why), {"require_no_guard_stop"}


def too_few(rng: random.Random) -> tuple[Outcome, set[str]]:
    n = rng.randint(10, 49)
    numbers = judged([0.0] * n, [1.0] * n)
    return dataclasses.replace(good(rng), **numbers), {"min_prompts"}


def equal(rng: random.Random) -> tuple[Outcome, set[str]]:
    """The start model itself."""
    same = scores(rng, rng.randint(60, 300), rng.uniform(0.55, 1))
    return dataclasses.replace(good(rng), **judged(same, same), kl=0.0, proxy_low=0.0), {"min_lift_low"}


NUMBERS = {
    "score": "min_score",
    "lift_low": "min_lift_low",
    "prompts": "min_prompts",
    "kl": "max_kl",
    "lengths": "max_length_ratio",
    "well_formed": "max_format_drop",
    "repetition": "max_repetition",
    "proxy_low": "proxy_agrees",
    "lift": "proxy_agrees",
}


def not_a_number(rng: random.Random) -> tuple[Outcome, set[str]]:
    name = rng.choice([*NUMBERS])
    wrong = rng.choice([math.nan, math.inf, -math.inf])
    value = (wrong, 0.5) if name in ("well_formed", "repetition") else wrong
    return dataclasses.replace(good(rng), **{name: (1.0, wrong) if name == "lengths" else value}), {
        NUMBERS[name]
    }


def weak(rng: random.Random) -> tuple[Outcome, set[str]]:
    """Surely better than a start that was nothing, and still below what is asked."""
    n = rng.randint(100, 300)
    numbers = judged([0.0] * n, scores(rng, n, rng.uniform(0.2, 0.48)))
    return dataclasses.replace(good(rng), **numbers), {"min_score"}


def not_known(rng: random.Random) -> tuple[Outcome, set[str]]:
    name = rng.choice([*set(NUMBERS) - {"lift"}, "guard_stop"])
    missing = (None, 0.5) if name in ("lengths", "well_formed", "repetition") else None
    return dataclasses.replace(good(rng), **{name: missing}), {NUMBERS.get(name, "require_no_guard_stop")}


KINDS: list[Callable[[random.Random], tuple[Outcome, set[str]]]] = [
    *(better, worse, noisy, long_winded, drifted, hacked, repetitive, format_broken),
    *(guard_stopped, too_few, equal, not_a_number, weak, not_known),
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_each_kind_of_outcome_is_decided_right(make: Callable[..., tuple[Outcome, set[str]]]) -> None:
    for seed in SEEDS:
        outcome, wrong = make(random.Random(f"{make.__name__} {seed}"))
        lines = decide(GATE, outcome)
        assert {line.check for line in failed(lines)} == wrong, (seed, outcome, lines)
        assert [line.check for line in lines] == [*(name for name in Gate.model_fields if name != "enable")]


def test_a_failed_line_says_by_how_much() -> None:
    lines = decide(GATE, dataclasses.replace(good(random.Random(0)), kl=0.45, score=0.25))
    assert [line.why for line in failed(lines)] == [
        "held-out score 0.25 is below 0.5, by 0.25",
        "KL to the reference on the probe 0.45 is above 0.3, by 0.15",
    ]


def test_nothing_known_passes_no_check_and_a_check_that_is_off_is_not_there() -> None:
    lines = decide(GATE, Outcome())
    assert all("not known" in line.why for line in lines)
    assert not any(line.passed for line in lines)
    off = {name: None for name in Gate.model_fields if name.startswith(("min", "max"))}
    assert decide(Gate(**off, proxy_agrees=False, require_no_guard_stop=False), Outcome()) == []


def test_what_trained_on_the_truth_has_no_proxy_to_disagree_with() -> None:
    outcome = dataclasses.replace(good(random.Random(1)), has_proxy=False, proxy_low=None)
    assert not failed(decide(GATE, outcome))


@pytest.mark.parametrize(
    ("field", "limit", "check"),
    [("score", 0.5, "min_score"), ("kl", 0.3, "max_kl"), ("prompts", 50, "min_prompts")],
)
def test_a_limit_itself_passes(field: str, limit: float, check: str) -> None:
    outcome = dataclasses.replace(good(random.Random(2)), **{field: limit})
    assert check not in {line.check for line in failed(decide(GATE, outcome))}


def test_a_lift_whose_interval_touches_its_limit_fails() -> None:
    outcome = dataclasses.replace(good(random.Random(3)), lift_low=0.0)
    assert [line.check for line in failed(decide(GATE, outcome))] == ["min_lift_low"]
