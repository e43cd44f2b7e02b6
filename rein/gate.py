"""Whether a trained model may go into service: what is known of it in, one line per check out.

Pure: reads no file and no model. What is not known, or not a finite number, is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rein.config.recipe import Gate

EVALUATE = "run `rein evaluate`"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of a model and of what it started from; None: not known.

    Outcome(score=0.9, lift=0.5, lift_low=0.45, prompts=500, kl=0.08, lengths=(11.2, 11.4),
    well_formed=(0.98, 0.99), repetition=(0.0, 0.0), guard_stop="")
    """

    score: float | None = None  # held out, of the truth
    lift: float | None = None
    lift_low: float | None = None  # lower end of its 95 % interval
    prompts: int | None = None  # that were judged
    kl: float | None = None  # to the reference on the probe, nats per token
    lengths: tuple[float | None, float | None] = (None, None)  # tokens of an answer, start and now
    well_formed: tuple[float | None, float | None] = (None, None)  # shares of answers
    repetition: tuple[float | None, float | None] = (None, None)  # shares of repeated 4-grams
    has_proxy: bool = False  # whether training maximised something else than the truth
    proxy_low: float | None = None  # lower end of the proxy's lift
    guard_stop: str | None = None  # why a guard ended the run and nobody took it up again; "": none did


@dataclass(frozen=True, slots=True)
class Line:
    """One check: Line("lift_low", -0.01, 0.0, False, "... is not above 0, by 0.01")."""

    check: str
    value: float | None
    limit: float | None
    passed: bool
    why: str

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for key in ("value", "limit"):
            if found[key] is not None and not math.isfinite(found[key]):
                found[key] = str(found[key])
        return found


def decide(gate: Gate, outcome: Outcome) -> list[Line]:
    """A line for each check that the gate asks for, in the order of its keys."""
    return list(_lines(gate, outcome))


def failed(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if not line.passed]


def _lines(gate: Gate, outcome: Outcome) -> Iterator[Line]:
    if gate.min_score is not None:
        yield _at_least("min_score", "held-out score", outcome.score, gate.min_score)
    if gate.min_lift_low is not None:
        yield _above("min_lift_low", "lower end of the lift", outcome.lift_low, gate.min_lift_low)
    if gate.min_prompts is not None:
        yield _at_least("min_prompts", "prompts judged", outcome.prompts, gate.min_prompts)
    if gate.max_kl is not None:
        do = "train here with a probe, or write gate.max_kl=null"
        yield _at_most("max_kl", "KL to the reference on the probe", outcome.kl, gate.max_kl, do)
    if gate.max_length_ratio is not None:
        before, after = outcome.lengths
        ratio = None if before is None or after is None else after / before if before else math.inf
        yield _at_most("max_length_ratio", "length over the start's", ratio, gate.max_length_ratio)
    if gate.max_format_drop is not None:
        drop = _minus(*outcome.well_formed)
        yield _at_most("max_format_drop", "fall of well-formed answers", drop, gate.max_format_drop)
    if gate.max_repetition is not None:
        rise = _minus(*reversed(outcome.repetition))
        yield _at_most("max_repetition", "rise of repeated 4-grams", rise, gate.max_repetition)
    if gate.proxy_agrees and outcome.has_proxy:
        yield _agrees(outcome)
    if gate.require_no_guard_stop:
        yield _not_stopped(outcome.guard_stop)


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _at_least(check: str, name: str, value: float | None, limit: float) -> Line:
    return _line(check, name, value, limit, value is not None and value >= limit, "below")


def _above(check: str, name: str, value: float | None, limit: float) -> Line:
    return _line(check, name, value, limit, value is not None and value > limit, "not above")


def _at_most(check: str, name: str, value: float | None, limit: float, do: str = EVALUATE) -> Line:
    return _line(check, name, value, limit, value is not None and value <= limit, "above", do)


def _line(
    check: str, name: str, value: float | None, limit: float, passed: bool, beyond: str, do: str = EVALUATE
) -> Line:
    if value is None:
        return Line(check, value, limit, False, f"{name} is not known; {do}")
    if not math.isfinite(value):
        return Line(check, value, limit, False, f"{name} is {value}, no number; look at what was evaluated")
    if passed:
        return Line(check, value, limit, True, f"{name} {value:.4g}, limit {limit:.4g}")
    by = f"by {abs(value - limit):.4g}"
    return Line(check, value, limit, False, f"{name} {value:.4g} is {beyond} {limit:.4g}, {by}")


def _agrees(outcome: Outcome) -> Line:
    """Fails where the proxy surely rose while the held-out score of the truth fell: the reward was gamed."""
    lift, proxy = outcome.lift, outcome.proxy_low
    known = _line("proxy_agrees", "lift of the proxy's lower end", proxy, 0.0, True, "")
    if not known.passed or proxy is None:
        return known
    if lift is None or not math.isfinite(lift):
        return _line("proxy_agrees", "lift of the held-out score", lift, 0.0, False, "")
    if proxy > 0 > lift:
        why = f"the proxy rose (by {proxy:.4g} or more) while the held-out score fell, by {-lift:.4g}"
        return Line("proxy_agrees", lift, 0.0, False, why)
    return Line("proxy_agrees", lift, 0.0, True, "the proxy does not rise while the held-out score falls")


def _not_stopped(reason: str | None) -> Line:
    check = "require_no_guard_stop"
    if reason is None:
        why = "whether a guard ended the run is not known; run `rein train` to its end"
        return Line(check, None, None, False, why)
    if reason:
        why = f"a guard ended the run and it was not taken up again: {reason}"
        return Line(check, None, None, False, why)
    return Line(check, None, None, True, "the run went to its end")
