"""Numbers out of text, exactly: "$1,000.00", "1e3", "−3" and "3/4" become fractions.

Text in, `Fraction` or None out. Knows commas, signs, currency, LaTeX wrappers and markers; knows nothing of
rewards.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

import numpy as np

_FULL_WIDTH: dict[int | str, str] = {0xFF10 + digit: str(digit) for digit in range(10)}
_SAME = str.maketrans({**_FULL_WIDTH, "，": ",", "．": ".", "−": "-", "－": "-", "⁄": "/"})
_NOISE = re.compile(r"\\[$!,;]|[$€£¥]|(?<=\d)\{,\}(?=\d)")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<top>(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,4}}(?![0-9]))?)(?:\s*/\s*(?P<bottom>[0-9]+))?"
)
_SIGNED = re.compile(rf"(?P<sign>(?<![\w)])[-+])?{_NUMBER.pattern}")
_WRAPPING = re.compile(
    r"(?:[\s:=*_~≈({\[]|\\(?:boxed|text|mathrm|mathbf|textbf)\s*\{|\\[(\[])*(?P<sign>[-+]?)\s*"
)
_UNIT = re.compile(r"[\s*)}\].]*(?:\\?%|°|(?:\\(?:text|mathrm)\s*\{)?[^\W\d_][\w\s/^.]*\}?)?[\s*)}\].]*")
MOST_DIGITS = 400  # a longer number is no answer, and costs quadratic time to read
LONGEST_UNIT = 40
MOST_MARKERS = 100  # tried from the end: a text of nothing but markers is no answer


def clean(text: str) -> str:
    """The same text with full-width digits, typographic minus and currency signs made plain."""
    plain = text.translate(_SAME)
    return _NOISE.sub(lambda found: "," if found.group() == "{,}" else "", plain)


def _value(sign: str | None, top: str, bottom: str | None) -> Fraction | None:
    mantissa, _, exponent = top.replace(",", "").lower().partition("e")
    if len(mantissa) + len(bottom or "") + abs(int(exponent or 0)) > MOST_DIGITS or (
        bottom and int(bottom) == 0
    ):
        return None
    value = Fraction(f"{mantissa}e{exponent or 0}") / int(bottom or 1)
    return -value if sign == "-" else value


def leading(text: str) -> tuple[Fraction, str] | None:
    """The number that `text` starts with, past spaces and LaTeX wrappers, and the text after it."""
    start = _WRAPPING.match(text)
    found = _NUMBER.match(text, start.end()) if start else None
    if start is None or found is None:
        return None
    value = _value(start["sign"], found["top"], found["bottom"])
    return None if value is None else (value, text[found.end() :])


def whole(text: str, *, units: bool = False) -> Fraction | None:
    """The number that `text` is; with `units`, "18 dollars" and "50%" are numbers too."""
    found = leading(clean(text))
    if found is None:
        return None
    value, rest = found
    stray = rest.strip(" \t\n.)}]*")
    is_unit = units and len(rest) <= LONGEST_UNIT and _UNIT.fullmatch(rest)
    return value if not stray or is_unit else None


def last(text: str) -> Fraction | None:
    """The last number anywhere in `text`."""
    found = deque(_SIGNED.finditer(clean(text)), maxlen=1)
    return _value(found[0]["sign"], found[0]["top"], found[0]["bottom"]) if found else None


def after(text: str, marker: str) -> Fraction | None:
    """The number right after the last `marker` that a number follows; what comes later is not read."""
    for tail in tails(text, marker):
        found = leading(clean(tail))
        if found is not None:
            return found[0]
    return None


def tails(text: str, marker: str) -> Iterator[str]:
    """What follows each `marker`, the last one first, cut after MOST_DIGITS characters."""
    end = len(text)
    for _ in range(MOST_MARKERS):
        at = text.rfind(marker, 0, end)
        if at < 0:
            return
        start = at + len(marker)
        yield text[start : start + MOST_DIGITS]
        end = at


def exact(value: Any) -> Fraction | None:
    """A Python or numpy number as a fraction: 0.1 means one tenth; None for what is no finite number."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return None
    if isinstance(value, Rational):
        return Fraction(value)
    if isinstance(value, Real) and math.isfinite(value):
        return Fraction(repr(float(value)))
    return None


def accepted(truth: Any) -> list[Any]:
    """Every accepted answer of a `ground_truth`: lists are opened; null, NaN and empty text are none."""
    if isinstance(truth, np.ndarray | list | tuple | set):
        return [answer for part in truth for answer in accepted(part)]
    if isinstance(truth, np.generic):
        truth = truth.item()
    if truth is None or isinstance(truth, dict) or (isinstance(truth, float) and not math.isfinite(truth)):
        return []
    if isinstance(truth, bool):
        return [str(truth)]
    return [truth] if not isinstance(truth, str) or truth.strip() else []
