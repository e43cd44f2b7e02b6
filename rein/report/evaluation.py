"""What evaluation.json says, for the page: the verdict, before and after, and the same in every part.

Two kinds are read: answers that were generated, and estimates from stored answers alone (`off_policy`).
Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rein.report.figures import interval, number, percent, points, signed

Facts = Mapping[str, Any]

ROWS = {  # key of a side in evaluation.json -> name, whether it is a share
    "accuracy": ("Greedy accuracy", True),
    "score": ("Mean score", False),
    "well_formed": ("Well-formed answers", True),
    "response_length": ("Tokens per answer", False),
    "repetition": ("Repeated 4-grams", True),
    "truncated": ("Cut off by the limit", True),
}
ESTIMATORS = {
    "control_variate": "Per decision, critic as control variate",
    "per_decision": "Per decision",
    "importance_sampling": "Whole products",
    "clipped": "Products clipped at the root of the rows",
    "self_normalised": "Self-normalised",
}
TRUST = {  # key of a side of off_policy -> name, what it should be
    "ess": ("Effective sample size, rows", "50 or more"),
    "pareto_k": ("Pareto k of the terms", "0.7 or less"),
    "products_k": ("Pareto k of the products", ""),
    "mean_weight": ("Mean product of the weights", "1, within its 99 % interval"),
    "kl_behavior": ("KL to who wrote the answers", "nats per token"),
}


def outcome(evaluation: Facts | None) -> dict[str, Any] | None:
    """The first thing to read: before, after, the lift with its interval, and what that means in words."""
    if evaluation is None:
        return None
    if "off_policy" in evaluation:
        return _by_stored_answers(evaluation["off_policy"])
    shares = evaluation["before"].get("accuracy") is not None
    return {
        "measure": "Accuracy" if shares else "Mean score",
        "what": f"{evaluation['n']} prompts that training has not seen, before and after",
        "how": "Paired bootstrap over prompts.",
        **_verdict(
            evaluation["before"]["score"],
            evaluation["after"]["score"],
            evaluation["lift"],
            evaluation["lift_ci95"],
            shares=shares,
        ),
    }


def _by_stored_answers(found: Facts) -> dict[str, Any]:
    """The same of an estimate; one that is not to be trusted proves nothing."""
    name = found["reported"]
    before, after = (found[side]["estimates"][name]["score"] for side in ("before", "after"))
    gap = found["difference"][name]
    said = _verdict(before, after, gap["score"], gap["ci95"], shares=False)
    if not found["trust"]:
        said |= {"verdict": "Not to be trusted", "tone": "bad"}
    what = f"{found['rows']} stored answers to {found['prompts']} held-out prompts; nothing was generated"
    return {
        "measure": "Estimated score",
        "what": what,
        "how": "Off-policy estimate, clustered by prompt.",
        **said,
    }


def _verdict(
    before: float, after: float, lift: float, ends: Sequence[float | None], *, shares: bool
) -> dict[str, Any]:
    low, high = ends
    verdict, tone = "No proven change", "even"
    if low is not None and low > 0:
        verdict, tone = "Better", "good"
    elif high is not None and high < 0:
        verdict, tone = "Worse", "bad"
    show, gap = (percent, points) if shares else (number, signed)
    return {
        "verdict": verdict,
        "tone": tone,
        "holds_zero": tone == "even",
        "before": show(before),
        "after": show(after),
        "lift": gap(lift),
        "low": "open" if low is None else gap(low),
        "high": "open" if high is None else gap(high),
        "unit": " points" if shares else "",
        "place": None if low is None or high is None else placed(lift, low, high),
    }


def placed(lift: float, low: float, high: float, left: float = 0.0, right: float = 0.0) -> dict[str, float]:
    """Where on a line from 0 to 100 the interval lies; the line holds 0 and `left` to `right`."""
    left, right = min(low, left, 0.0), max(high, right, 0.0)
    pad = 0.1 * (right - left) or 1.0
    spots = {"low": low, "high": high, "zero": 0.0, "lift": lift}
    return {name: 100 * (value - left + pad) / (right - left + 2 * pad) for name, value in spots.items()}


def comparison(evaluation: Facts | None) -> list[dict[str, str]]:
    """The before/after table; pass@k rows after the accuracy, the score only where it is not the accuracy."""
    if evaluation is None or "off_policy" in evaluation:
        return []
    before, after = evaluation["before"], evaluation["after"]
    right_or_wrong = before.get("accuracy") is not None
    passes = [key for key in before if key.startswith("pass@")]
    keys = ["accuracy", *passes] if right_or_wrong else ["score"]
    rows = []
    for key in [*keys, "well_formed", "response_length", "repetition", "truncated"]:
        if key not in before or key not in after:
            continue
        name, share = ROWS.get(key, (key, True))
        show = percent if share else number
        difference = after[key] - before[key]
        row = {"name": name, "before": show(before[key]), "after": show(after[key])}
        row["difference"] = points(difference) if share else signed(difference)
        for side, facts in (("before", before), ("after", after)):
            ends = facts.get(f"{key}_ci95")
            row[f"{side}_interval"] = f"{100 * ends[0]:.1f} to {percent(ends[1])}" if ends else ""
        rows.append(row)
    return rows


def wins(evaluation: Facts | None) -> str:
    """In a sentence how often the trained model's answer is the better one."""
    if evaluation is None or evaluation.get("win_rate") is None:
        return ""
    ends = evaluation.get("win_rate_ci95")
    within = f" (95 % {interval(ends, percent)})" if ends else ""
    return (
        f"Win rate {percent(evaluation['win_rate'])}{within}: the share of prompts on which the trained "
        "model's greedy answer scores higher than the start's; ties count half."
    )


def parts(evaluation: Facts | None) -> list[dict[str, Any]]:
    """The lift by source, by length, by seed and of the proxy: tables of one form, with a scale each."""
    return [table for table in _parts(evaluation or {}) if table["rows"]]


def _parts(evaluation: Facts) -> Iterator[dict[str, Any]]:
    shares = (evaluation.get("before") or {}).get("accuracy") is not None
    sources = evaluation.get("by_data_source") or {}
    if len(sources) > 1:
        yield _table("By data source", "Source", "", list(sources.items()), shares=shares)
    lengths = evaluation.get("by_length") or []
    if len(lengths) > 1:
        note = "Prompts in quarters by the tokens of the start's answer."
        rows = [(_span(part["tokens"]), part) for part in lengths]
        yield _table("By length", "Tokens", note, rows, shares=shares)
    if sampled := evaluation.get("sampled"):
        note = _seeds(evaluation, sampled)
        yield _table("Sampled answers", "Drawn with", note, _draws(sampled), shares=shares)
    if proxy := evaluation.get("proxy"):
        names = ", ".join(proxy.get("reward", ())) or "the reward"
        won = f" Its win rate: {percent(proxy['win_rate'])}." if "win_rate" in proxy else ""
        note = f"What training maximised ({names}), on the greedy answers it can judge.{won} "
        note += "A proxy that rises while the truth falls is a reward being gamed."
        yield _table("The proxy", "Judge", note, [("proxy", proxy), ("truth", _truth(evaluation))])


def _truth(evaluation: Facts) -> Facts:
    sides = {side: evaluation[side]["score"] for side in ("before", "after")}
    return {key: evaluation[key] for key in ("n", "lift", "lift_ci95")} | sides


def _span(tokens: Sequence[int]) -> str:
    low, high = tokens
    return f"{low}" if low == high else f"{low} to {high}"


def _draws(sampled: Facts) -> list[tuple[str, Facts]]:
    seeds = sampled.get("by_seed") or []
    rows = [(f"seed {i}", one) for i, one in enumerate(seeds, 1)] if len(seeds) > 1 else []
    return [*rows, ("all" if rows else "one seed", sampled)]


def _seeds(evaluation: Facts, sampled: Facts) -> str:
    drawn = (
        f"{evaluation['pass_k']} answers to each prompt at temperature {number(evaluation['temperature'])}"
    )
    spread = sampled.get("lift_std_over_seeds")
    if spread is None:
        return f"Mean score of {drawn}."
    return (
        f"Mean score of {drawn}, from each of {evaluation['seeds']} seeds. The lift's standard deviation "
        f"over seeds is {number(spread)}: so much of it is the draw."
    )


def _table(
    title: str, head: str, note: str, rows: Sequence[tuple[str, Facts]], *, shares: bool = False
) -> dict[str, Any]:
    ends = [end for _, part in rows for end in part["lift_ci95"] if end is not None]
    left, right = min(ends, default=0.0), max(ends, default=0.0)
    return {
        "title": title,
        "head": head,
        "note": note,
        "rows": [{"name": name, **_row(part, left, right, shares=shares)} for name, part in rows],
    }


def _row(part: Facts, left: float, right: float, *, shares: bool) -> dict[str, Any]:
    low, high = part["lift_ci95"]
    show, gap = (percent, points) if shares else (number, signed)
    tone = "good" if low > 0 else "bad" if high < 0 else "even"
    return {
        "n": part["n"],
        "before": show(part["before"]),
        "after": show(part["after"]),
        "lift": gap(part["lift"]),
        "low": gap(low),
        "high": gap(high),
        "place": placed(part["lift"], low, high, left, right),
        "tone": tone,
    }


def stored_answers(evaluation: Facts | None) -> dict[str, Any] | None:
    """Off-policy evaluation: every estimate, what trust is judged by, and the judgement in words."""
    found = (evaluation or {}).get("off_policy")
    if found is None:
        return None
    sides = ("before", "after")
    refused = [f"{side}: {reason}" for side in sides for reason in found[side]["reasons"]]
    return {
        "trusted": found["trust"],
        "reasons": refused,
        "reported": ESTIMATORS.get(found["reported"], found["reported"]),
        "estimates": [
            {
                "name": ESTIMATORS.get(name, name),
                "reported": name == found["reported"],
                "cells": [
                    *(_estimate(found[side]["estimates"][name], number) for side in sides),
                    _estimate(found["difference"][name], signed),
                ],
            }
            for name in found["difference"]
        ],
        "trust": [
            {"name": name, "limit": limit, **{side: number(found[side].get(key)) for side in sides}}
            for key, (name, limit) in TRUST.items()
        ],
    }


def _estimate(found: Facts, show: Any) -> dict[str, str]:
    return {"value": show(found["score"]), "interval": interval(found["ci95"], show)}
