"""Trajectories token by token, for the page: rows of token records in, what its script draws out.

A row has tokens (text of each), and as many numbers of each kind it knows. Bounded: a few batches, a few
rows of each, the first tokens of a row. What a model wrote is cleaned here and set as text by the script.
Knows no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from rein.report.text import shown

MOST_BATCHES, MOST_ROWS, MOST_TOKENS = 6, 8, 600
LONGEST_TOKEN, LONGEST_PROMPT = 64, 1200  # characters
DIGITS: Final = 5

# name on the page, key, whether it has a sign, in a sentence
KINDS: Final = (
    (
        "Log-ratio",
        "log_ratio",
        True,
        "log actor / reference: how much likelier (+) or less likely (−) the token is than at the start.",
    ),
    (
        "Advantage",
        "advantages",
        True,
        "how much better (+) or worse (−) than expected; what the update pushes by.",
    ),
    (
        "KL",
        "kl",
        False,
        "what the token adds to the distance from the start, by the estimator k3_soft; never negative.",
    ),
    ("Value", "values", False, "what the critic expects of the rest of the answer."),
)
DETAILS: Final = (  # of a token, in the line that focus and hovering show
    ("log actor", "old_log_probs"),
    ("log reference", "reference_log_probs"),
    ("log behavior", "behavior_log_probs"),
    ("weight", "weights"),
)

Record = Mapping[str, Any]
T = TypeVar("T")


def section(records: Sequence[Record]) -> dict[str, Any] | None:
    """What the script draws; None where there is nothing to draw."""
    batches: dict[int, list[Record]] = {}
    for record in records:
        if record["tokens"]:
            batches.setdefault(record["batch"], []).append(record)
    if not batches:
        return None
    drawn = [{"batch": n + 1, "rows": [_row(r) for r in _most(batches[n])]} for n in spread(sorted(batches))]
    kinds = [
        {"name": name, "key": key, "signed": signed, "sentence": sentence, "scale": scale}
        for name, key, signed, sentence in KINDS
        if (scale := _scale(drawn, key, signed=signed)) is not None
    ]
    return {"batches": drawn, "kinds": kinds, "details": DETAILS}


def spread(batches: Sequence[T]) -> list[T]:
    """As many as are shown: the first, the last, and others evenly between."""
    last = len(batches) - 1
    if last < MOST_BATCHES:
        return list(batches)
    return [batches[i * last // (MOST_BATCHES - 1)] for i in range(MOST_BATCHES)]


def _most(records: Sequence[Record]) -> list[Record]:
    """The first ones, and of all the ones that became most and least likely."""
    sums = [math.fsum(_log_ratio(record) or [0.0]) for record in records]
    order = range(len(records))
    ends = [max(order, key=lambda i: sums[i]), min(order, key=lambda i: sums[i])]
    kept = list(dict.fromkeys([*order[: MOST_ROWS - 2], *ends, *order]))[:MOST_ROWS]
    return [records[i] for i in sorted(kept)]


def _log_ratio(record: Record) -> list[float] | None:
    old, reference = record.get("old_log_probs"), record.get("reference_log_probs")
    if old is None or reference is None:
        return None
    mask = record.get("response_mask") or [True] * len(old)
    return [o - r if counts else 0.0 for o, r, counts in zip(old, reference, mask, strict=True)]


def _row(record: Record) -> dict[str, Any]:
    whole = dict(record) | {"log_ratio": _log_ratio(record)}
    keys = [key for _, key, *_ in (*KINDS, *DETAILS)]
    total = whole["log_ratio"] and math.fsum(whole["log_ratio"])
    score = record.get("score")
    return {
        "row": shown(record["row"])[:200],
        "prompt": shown(record["prompt"])[:LONGEST_PROMPT],
        "score": None if score is None else _rounded(score),
        "sum": None if total is None else _rounded(total),
        "tokens": [visible(token) for token in record["tokens"][:MOST_TOKENS]],
        "left_out": max(len(record["tokens"]) - MOST_TOKENS, 0),
        "off": [i for i, on in enumerate((record.get("response_mask") or [])[:MOST_TOKENS]) if not on],
        **{key: [_rounded(v) for v in whole[key][:MOST_TOKENS]] for key in keys if whole.get(key)},
    }


def visible(token: str) -> str:
    """A token's text as it may stand on a page; what turns the direction of text is shown as its number."""
    text = token[:LONGEST_TOKEN] + ("…" if len(token) > LONGEST_TOKEN else "")
    return shown("".join(f"⟨{ord(c):X}⟩" if _steers(c) else c for c in text))


def _steers(character: str) -> bool:
    code = ord(character)
    return code in (0x61C, 0x200E, 0x200F, 0xFEFF) or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069


def _scale(drawn: Sequence[Mapping[str, Any]], key: str, *, signed: bool) -> list[float] | None:
    """The ends of the colours: all but the furthest twentieth, so that few tokens do not pale the others."""
    found = sorted(v for part in drawn for row in part["rows"] for v in row.get(key, ()) if v is not None)
    if not found:
        return None
    if signed:
        sizes = sorted(map(abs, found))
        end = sizes[int(0.95 * (len(sizes) - 1))] or sizes[-1] or 1.0
        return [-end, end]
    low, high = (0.0 if key == "kl" else found[0]), found[int(0.95 * (len(found) - 1))]
    high = high if high > low else found[-1]
    return [low, high if high > low else low + 1.0]


def _rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
