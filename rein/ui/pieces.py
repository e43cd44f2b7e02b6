"""A row's answer as colored tokens: what each token is, its exact numbers, how strong its color is.

Pieces come from the file (train/tokens/*.parquet), or from a tokenizer that gives the row's very text.
Knows no page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rein.ui.folder import Broken

MOST = 4000  # tokens on one page
STRENGTHS = 4  # of a color, on each side of zero
LARGEST_TOKENIZER = 128 * 2**20  # bytes
INVISIBLE = {"\n": "↵\n", "\r": "␍", "\t": "⇥\t", "": "∅"}

Floats = list[float | None]


@dataclass(frozen=True, slots=True)
class Color:
    """What tokens can be colored by."""

    label: str
    says: str
    columns: tuple[str, ...]  # one, or two whose difference it is


COLORS = {
    "log_ratio": Color(
        "log-ratio to the reference",
        "old minus reference log-prob: above 0 the actor finds the token likelier than the start policy did",
        ("old_log_probs", "reference_log_probs"),
    ),
    "behavior_ratio": Color(
        "log-ratio to the behavior policy",
        "old minus behavior log-prob: how far the actor has moved from the policy that wrote the answer",
        ("old_log_probs", "behavior_log_probs"),
    ),
    "advantage": Color("advantage", "above 0 the update makes the token likelier", ("advantages",)),
    "kl": Color("KL", "the token's share of the KL to the reference, nats", ("kl",)),
    "value": Color("value", "what the critic expects from here on", ("values",)),
    "weight": Color("weight", "off-policy weight in the loss", ("weights",)),
    "behavior": Color("behavior log-prob", "of the policy that wrote the answer", ("behavior_log_probs",)),
    "old": Color("old log-prob", "of the actor at the start of the batch", ("old_log_probs",)),
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One token."""

    number: int
    text: str
    counts: bool  # by the response mask
    strength: int  # -STRENGTHS to STRENGTHS; 0 is no color
    numbers: tuple[float | None, ...]  # of each color of the row, in order


@dataclass(frozen=True, slots=True)
class Colored:
    """A row's tokens, colored by one of `colors`."""

    pieces: list[Piece]
    colors: list[str]
    by: str
    limit: float  # at and beyond it the color is strongest
    shades: range  # strengths that there can be: on one side of zero alone where all numbers are
    total: int  # tokens of the answer


def colored(row: Mapping[str, Any], texts: Sequence[str], by: str, part: int = 0) -> Colored | None:
    """The tokens from `part` * MOST on; None where the row has no number for them."""
    numbers = {name: found for name in COLORS if (found := _numbers(row, name, len(texts))) is not None}
    if not numbers or not texts:
        return None
    by = by if by in numbers else next(iter(numbers))
    mask = row.get("response_mask")
    known = isinstance(mask, list) and len(mask) == len(texts)
    counts = [bool(value) for value in mask] if known and mask is not None else [True] * len(texts)
    counted = [v for v, c in zip(numbers[by], counts, strict=True) if c and v is not None]
    limit = _limit(counted)
    lowest = -STRENGTHS if min(counted, default=0) < 0 else 0
    shades = range(lowest, 1 + (STRENGTHS if max(counted, default=0) > 0 or not lowest else 0))
    first = part * MOST
    pieces = [
        Piece(
            i,
            visible(texts[i]),
            counts[i],
            _strength(numbers[by][i], limit) if counts[i] else 0,
            tuple(found[i] for found in numbers.values()),
        )
        for i in range(first, min(first + MOST, len(texts)))
    ]
    return Colored(pieces, list(numbers), by, limit, shades, len(texts))


def from_file(row: Mapping[str, Any]) -> list[str]:
    """The pieces that the file itself holds."""
    tokens = row.get("tokens")
    return [str(token) for token in tokens] if isinstance(tokens, list) else []


def from_tokenizer(row: Mapping[str, Any], path: Path) -> list[str]:
    """The pieces of the response ids, where this tokenizer.json turns them into the row's very response."""
    ids, response = row.get("response_ids"), row.get("response")
    if not isinstance(ids, list) or not isinstance(response, str) or not ids:
        return []
    if any(not isinstance(i, int) or not 0 <= i < 2**31 for i in ids):
        return []
    tokenizer = _load(path)
    if tokenizer.decode(ids, skip_special_tokens=True) != response:
        return []
    return [tokenizer.decode([i], skip_special_tokens=False) or str(tokenizer.id_to_token(i)) for i in ids]


def visible(text: str) -> str:
    """A token as it may be read: line ends and tabs get a sign."""
    if not text:
        return INVISIBLE[""]
    return "".join(INVISIBLE.get(c, c) for c in text)


def _load(path: Path) -> Any:
    from tokenizers import Tokenizer

    if path.stat().st_size > LARGEST_TOKENIZER:
        raise Broken(f"{path.name}: larger than {LARGEST_TOKENIZER >> 20} MB; it is not read")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # whatever the library raises: it has no class of its own
        raise Broken(f"{path.name}: no tokenizer ({str(error)[:80]})") from error


def _numbers(row: Mapping[str, Any], name: str, length: int) -> Floats | None:
    """The color's number of each token; None where the row lacks them."""
    columns = [row.get(column) for column in COLORS[name].columns]
    lists = [column for column in columns if isinstance(column, list) and len(column) == length]
    if len(lists) < len(columns) or not all(_is_number(v) for column in lists for v in column):
        return None
    if len(lists) == 1:
        return [_finite(value) for value in lists[0]]
    return [
        None if a is None or b is None else _finite(a - b)
        for a, b in zip(*(map(_finite, column) for column in lists), strict=True)
    ]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and abs(value) < 1e300 and value == value else None


def _limit(values: list[float]) -> float:
    """What 95 % of the sizes stay within, rounded up."""
    sizes = sorted(map(abs, values))
    size = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))] if sizes else 0.0
    if size < 1e-12:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(size))
    steps = (step * decade for step in (1, 1.5, 2, 3, 5, 7, 10))
    return float(next(step for step in steps if size <= step * (1 + 1e-9)))


def _strength(value: float | None, limit: float) -> int:
    if value is None:
        return 0
    return int(math.copysign(min(STRENGTHS, math.ceil(STRENGTHS * abs(value) / limit - 0.5)), value))
