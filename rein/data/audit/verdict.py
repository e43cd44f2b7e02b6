"""What follows from an audit's facts: train, train with these settings, or don't, and why.

Every limit is a constant here. A verdict's settings are keys of a recipe that hold where the recipe does not
give them itself; `algorithm.method: auto` obeys them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MIN_ROWS: Final = 128  # fewer say more about chance than about answers
MIN_PROMPTS: Final = 16
COPIES: Final = 0.2  # share of rows that are copies beyond what the policy would repeat by itself
CONTRADICTIONS: Final = 0.05  # of pairs of equal answers to a prompt, the share that scores differently
LENGTH: Final = 0.5  # correlation of score and length among a prompt's answers
DRIFT: Final = 0.02  # nats per token from the behavior policy: the articles' limit
REPRODUCED: Final = 0.01, 0.05  # nats: median and 99th percentile of |stored - the model's own|
WEIGHT: Final = 0.03  # token weights average 1 where the stored log-probs are the sampler's own
ONE_SIDED: Final = 0.01  # nats below the model's own that rounding explains
LIKELIER: Final = 8.0  # nats over the sample by which another temperature fits better
CUT: Final = 10.0  # tokens expected beyond a nucleus where none is
BESIDE: Final = 0.4  # of those expected just within it, that are there: a colder policy thins them out too
NEARER: Final = 0.7  # |stored - the model's own| at another temperature / at the stated one
OWN: Final = 0.01  # nats per token of surprise at answers that may be the model's own
BOUNDED: Final = "use token weights, truncated, never weights of whole rows"
FAR: Final = 1.0  # nats per token that the answers surprise the model more than its own would


class Reason(NamedTuple):
    """`finding` is one of a few names; `level`: stop (don't train), limit (a setting answers it) or note."""

    finding: str
    level: str
    said: str


class Verdict(NamedTuple):
    """`decision`: train, limits (train with the settings) or stop."""

    decision: str
    method: str
    settings: dict[str, Any]
    reasons: list[Reason]

    def as_json(self) -> dict[str, Any]:
        """The fields, and word, tone and sentences for a page."""
        word, tone = WORDS[self.decision]
        sentences = [f"{reason.said[:1].upper()}{reason.said[1:]}." for reason in self.reasons]
        if self.decision != "stop":
            keys = " ".join(f"{key}={value}" for key, value in self.settings.items())
            sentences.append(f"algorithm.method=auto follows this: {self.method} {keys}".rstrip() + ".")
        found = {**self._asdict(), "reasons": [reason._asdict() for reason in self.reasons]}
        return found | {"word": word, "tone": tone, "sentences": sentences}


WORDS: Final = {  # of a decision: what to do, and how it looks on a page
    "train": ("train", "good"),
    "limits": ("train, within limits", "even"),
    "stop": ("don't train", "bad"),
}


class Evidence(NamedTuple):
    """What the structural facts say, in the few numbers that a verdict is made of; None: not known."""

    kind: str  # trajectories, preferences, prompts, sft
    rows: int  # usable
    prompts: int
    scored: int
    scores: int  # different ones
    known: int | None = None  # rows that have behavior log-probs
    copies: float = 0.0  # share of rows that repeat another, less what their log-probs make expected
    answers: int = 0  # to a prompt, the median
    contradictions: float | None = None
    length: float | None = None  # correlation within prompts
    shared: int = 0  # rows whose prompt is in the evaluation file
    shared_files: tuple[str, ...] = ()


def judge(evidence: Evidence, model: Mapping[str, Any] | None = None, *, recomputed: bool = False) -> Verdict:
    """`model`: audit.model.facts, where a model was given; `recomputed`: who wrote the rows is named."""
    reasons = _stops(evidence)
    if evidence.kind == "preferences":
        reasons.append(Reason("preferences", "note", "pairs of answers without scores: dpo learns from them"))
    settings: dict[str, Any] = {}
    method = "dpo" if evidence.kind == "preferences" else "ppo"
    some = evidence.known is not None and 0 < evidence.known < evidence.rows
    if some and not recomputed:
        said = (
            f"{evidence.rows - (evidence.known or 0)} of {evidence.rows} rows have no log-probs: none is used"
        )
        reasons.append(Reason("some log-probs", "limit", said))
        settings["data.behavior"] = "unknown"
    elif model is not None and method == "ppo" and not recomputed:
        for reason, keys in _behavior(model, copied=evidence.copies > COPIES):
            reasons.append(reason)
            settings |= keys
    if model is not None and not recomputed:
        far = model["surprise"]["low"]
        unknown = "behavior" not in model or settings.get("data.behavior") == "unknown"
        if far > FAR and unknown and method == "ppo":
            method = "awr"
            said = (
                f"the answers surprise the model by {far:.2f} nats a token more than its own would, and who "
                "wrote them is unknown: awr imitates the better ones and needs no log-probs"
            )
            reasons.append(Reason("far", "limit", said))
    believed = "behavior" in (model or {}) and "data.behavior" not in settings
    for reason, keys in _rows(evidence, evidence.copies if believed else 0.0):
        reasons.append(reason)
        settings |= keys
    stop = any(reason.level == "stop" for reason in reasons)
    limits = bool(settings) or any(reason.level == "limit" for reason in reasons)
    return Verdict("stop" if stop else "limits" if limits else "train", method, settings, reasons)


def _stops(e: Evidence) -> list[Reason]:
    if e.kind not in ("trajectories", "preferences"):
        do = "generate answers first (rein rollout)" if e.kind == "prompts" else "use them for sft"
        return [Reason("no answers", "stop", f"a file of {e.kind} has no scored answers: {do}")]
    found = []
    left = e.rows - e.shared
    if left < MIN_ROWS or e.prompts < MIN_PROMPTS:
        others = f", less {e.shared} that answer evaluation prompts," if e.shared else ""
        said = (
            f"{e.rows} usable rows of {e.prompts} prompts{others} are too few: give {MIN_ROWS} rows or more"
        )
        said += f" of {MIN_PROMPTS} prompts or more"
        found.append(Reason("too few", "stop", said))
    if e.kind == "preferences":
        return found
    if not e.scored:
        found.append(Reason("no score", "stop", "no row has a score: score them first (rein score)"))
    elif e.scores < 2:
        said = "every answer scores the same: there is nothing to prefer"
        found.append(Reason("no spread", "stop", said))
    return found


def _rows(e: Evidence, copies: float) -> list[tuple[Reason, dict[str, Any]]]:
    found: list[tuple[Reason, dict[str, Any]]] = []
    if e.shared:
        said = (
            f"{e.shared} rows answer prompts of the evaluation file: they are left out, or it measures memory"
        )
        found.append((Reason("leaked", "limit", said), {"data.leave_out": list(e.shared_files)}))
    if copies > COPIES:
        said = (
            f"{copies:.0%} of the rows repeat another more often than sampling would: of equal answers as "
            f"many are kept as a prompt usually has, {e.answers}"
        )
        found.append((Reason("duplicated", "limit", said), {"data.max_copies": e.answers}))
    if e.contradictions is not None and e.contradictions > CONTRADICTIONS:
        said = (
            f"{e.contradictions:.0%} of equal answers to a prompt score differently: the reward is noisy; "
            "ppo bears it, imitation of the best (filtered_bc, awr) learns the mistakes"
        )
        found.append((Reason("reward noise", "note", said), {}))
    if e.length is not None and abs(e.length) > LENGTH:
        more = "longer" if e.length > 0 else "shorter"
        said = (
            f"{more} answers to a prompt score higher (correlation {e.length:+.2f}): if that is not meant, "
            "correct the reward or set reward_manager.length_penalty; watch val/response_length"
        )
        found.append((Reason("length", "note", said), {}))
    return found


def _behavior(model: Mapping[str, Any], *, copied: bool) -> list[tuple[Reason, dict[str, Any]]]:
    """Whether the stored log-probs are those of whoever wrote the answers.

    Rows that were copied say nothing of a temperature: the sample is not one of any policy.
    """
    if "behavior" not in model:
        said = "behavior log-probs are not stored"
        return [_without(model, "behavior unknown", "note", said)]
    gap, cut = model["behavior"], _cut(model)
    if gap["median"] < REPRODUCED[0] and gap["p99"] < REPRODUCED[1] and not _elsewhere(model):
        if cut is not None:
            said = (
                f"the answers come from a nucleus (top_p about {cut:.2f}), and the log-probs do not say so: "
                f"weights are up to {1 / max(cut, 0.01):.2g} times too large, {BOUNDED}"
            )
            return [(Reason("top-p cut", "limit", said), {})]
        likely = None if copied else _likely(model)
        if likely is not None:
            said = (
                f"the answers look sampled at temperature {likely:g}, but their log-probs are those at "
                f"{model['stated_temperature']:g}: {BOUNDED}"
            )
            return [(Reason("wrong temperature", "limit", said), {})]
        said = f"the model reproduces the stored log-probs within {gap['p99']:.2g} nats: they are its own"
        return [(Reason("reproduced", "note", said), {})]
    if gap["lowest"] > -ONE_SIDED and gap["p99"] > 2 * ONE_SIDED:
        said = "the stored log-probs are never below the model's own, as after a top-p or top-k cut"
        return [(Reason("top-p cut", "limit", f"{said}: {BOUNDED}"), {})]
    weight = model["token_weight"]
    if weight["low"] > 1 + WEIGHT or weight["high"] < 1 - WEIGHT:
        said = (
            f"importance weights average {weight['mean']:.3g} ({weight['low']:.3g} to {weight['high']:.3g}), "
            "not 1: the stored log-probs are not of who wrote the answers, and are not used"
        )
        return [_without(model, "wrong model", "limit", said)]
    return _stale(model)


def _without(model: Mapping[str, Any], finding: str, level: str, said: str) -> tuple[Reason, dict[str, Any]]:
    """What to do where there are no log-probs to use: the model's own, where the answers are its own."""
    surprise = model["surprise"]
    own = surprise["low"] <= OWN and surprise["high"] >= -OWN
    if own and _likely(model) is None and _cut(model) is None:
        settings = {"data.behavior": "recomputed", "data.behavior_model": model["path"]}
        said += "; the answers look like the model's own, so its log-probs are taken"
        return Reason(finding, "limit", said), settings
    said += "; without them there are no importance weights"
    return Reason(finding, level, said), {} if "behavior" not in model else {"data.behavior": "unknown"}


def _stale(model: Mapping[str, Any]) -> list[tuple[Reason, dict[str, Any]]]:
    distance, ess = model["distance"]["k3_kl"], model["weights"]["seq_ess"]
    said = f"another policy wrote the answers, {distance:.3f} nats a token away"
    if distance <= DRIFT:
        return [(Reason("near", "note", f"{said}, within the limit of {DRIFT}"), {})]
    shape = model["weights"].get("seq_pareto_k", math.nan)
    tail = f", Pareto k {shape:.2f}" if math.isfinite(shape) else ""
    said += f", above {DRIFT}: importance weights are needed (ESS of rows {ess:.2f}{tail})"
    return [(Reason("stale", "note", said), {})]


def _cut(model: Mapping[str, Any]) -> float | None:
    """top_p, where tokens that a cut leaves out are missing."""
    expected, seen = model["cut"]["expected"], model["cut"]["seen"]
    names = list(expected)
    missing = [i for i, name in enumerate(names) if expected[name] >= CUT and seen[name] == 0]
    if not missing or missing[0] < 2:
        return None
    within, first = names[missing[0] - 2], names[missing[0]]
    beside = seen[within] / max(expected[within] - expected[first], 1)
    return float(model["cut"]["highest"]) if beside > BESIDE else None


def _elsewhere(model: Mapping[str, Any]) -> bool:
    """Whether the stored log-probs are the model's own at another temperature, where the answers fit it."""
    near, means = model["behavior"]["temperatures"], model["temperatures"]
    at = min(near, key=lambda name: near[name])
    fits = (max(means.values()) - means[at]) * model["tokens"] <= LIKELIER
    return bool(near[at] < NEARER * model["behavior"]["mean_abs"]) and fits


def _likely(model: Mapping[str, Any]) -> float | None:
    """The temperature at which the answers are likeliest, where that is not the stated one."""
    means = model["temperatures"]
    best = max(means, key=lambda name: means[name])
    gain = (means[best] + model["nll"]) * model["tokens"]
    low, high = model["surprise"]["low"], model["surprise"]["high"]
    return float(best) if gain > LIKELIER and not low <= 0 <= high else None
