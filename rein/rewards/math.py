"""Maths answers against the row's ground truth: 1 right, 0 wrong, None where the row holds no truth.

`gsm8k` and `exact` read the number after a marker; `math` reads \\boxed{}, `####`, "the answer is" or the
last number, and asks math-verify about what is no plain number. A ground truth may be a number, text, or a
list of accepted answers. Text after the answer changes nothing. Knows nothing of tokens:
`Trajectory.response` ends before the first stop token.
"""

import re
from fractions import Fraction
from typing import Any

from rein.errors import ConfigError
from rein.protocols import Reward
from rein.rewards import numbers
from rein.rewards.checker import LONGEST, SECONDS, Checker
from rein.rewards.per_row import per_row
from rein.types import Trajectory

GSM8K_MARKER = "####"
_ANSWER_IS = re.compile(r"(?:answer|result)\s*(?:is|:|=)|答案(?:是|为|：|:)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_GOES_ON = re.compile(r"[A-Za-z]|\s*(?:[\\^*/+=({_]|-\s*(?:[0-9\\(]|[A-Za-z]\b))")  # 2\sqrt{3} is not 2
_HAS_LATEX = re.compile(r"[\\$^]")


def exact(*, marker: str = GSM8K_MARKER, method: str = "strict") -> Reward:
    """1 where the number after the last `marker` equals the truth exactly ("1,000" is 1000, "0.50" is 1/2).

    method `strict`: no marker, no point; `flexible`: without a marker the last number of the response counts.
    A truth that is no number is compared as text with what follows the marker.
    """
    if method not in ("strict", "flexible") or not marker:
        raise ConfigError(
            f"reward exact: method={method!r} marker={marker!r}; give strict or flexible, and some marker"
        )

    def score(row: Trajectory) -> float | None:
        truths = numbers.accepted(row.ground_truth)
        if not truths:
            return None
        said = numbers.after(row.response, marker)
        if said is None and method == "flexible":
            said = numbers.last(row.response)
        return float(any(_same(said, row.response, truth, marker) for truth in truths))

    return per_row(score)


def _same(said: Fraction | None, response: str, truth: Any, marker: str) -> bool:
    number = numbers.exact(truth)
    if number is None:
        text = str(truth)
        number = numbers.after(text, marker)
        if number is None:
            number = numbers.whole(boxed(text) or text, units=True)
    if number is not None:
        return said == number
    wanted = plain(str(truth))
    tail = plain(next(numbers.tails(response, marker), ""))
    return bool(wanted) and re.match(rf"{re.escape(wanted)}(?!\w)", tail) is not None


def math(*, seconds: float = SECONDS) -> Reward:
    """1 where the final answer has the truth's value: 1/2 is 0.5 is \\frac12; see `equal`. `seconds` bounds
    one comparison.
    """
    if not seconds > 0:
        raise ConfigError(f"reward math: seconds={seconds}; give a number above 0")
    checker = Checker(seconds)

    def score(row: Trajectory) -> float | None:
        truths = numbers.accepted(row.ground_truth)
        return float(any(equal(row.response, truth, checker) for truth in truths)) if truths else None

    return per_row(score)


def equal(response: str, truth: Any, checker: Checker) -> bool:
    """Whether the response's final answer is `truth`: by number, then by text, then by math-verify."""
    wanted = _truth_text(truth)
    number = numbers.exact(truth)
    if number is None:
        number = numbers.whole(wanted)
    answer = final_answer(response)
    if answer is None:
        if number is not None and _last_number(response) == number:
            return True
        needs_parsing = number is None or _HAS_LATEX.search(response) is not None
        return needs_parsing and checker.equal(response, f"\\boxed{{{wanted}}}")
    said = numbers.whole(answer)
    if (
        said is not None
        and number is not None
        and (said == number or said.denominator == number.denominator == 1)
    ):
        return said == number
    if plain(answer) == plain(wanted):
        return True
    return checker.equal(f"\\boxed{{{answer}}}", f"\\boxed{{{wanted}}}")


def _truth_text(truth: Any) -> str:
    text = str(truth)
    after_marker = next(numbers.tails(text, GSM8K_MARKER), None)
    if after_marker is not None:
        return after_marker.strip()
    text = boxed(text) or text
    return text.strip().strip("$").strip()


def final_answer(response: str) -> str | None:
    """What the response marks as its answer: the last \\boxed{}, else what follows the last `####`."""
    box = boxed(response)
    if box is not None:
        return box
    for tail in numbers.tails(response, GSM8K_MARKER):
        found = numbers.leading(numbers.clean(tail))
        if found is not None and not _GOES_ON.match(found[1]):
            return str(found[0])
        if tail.strip():
            return tail.strip().splitlines()[0].strip().strip("$")
    return None


def _last_number(response: str) -> Fraction | None:
    said = list(_ANSWER_IS.finditer(response))
    found = numbers.leading(numbers.clean(response[said[-1].end() :])) if said else None
    return found[0] if found is not None else numbers.last(response)


def boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}; None without one."""
    for box in reversed(list(_BOX.finditer(text))[-numbers.MOST_MARKERS :]):
        depth = 1
        for at in range(box.end(), min(len(text), box.end() + LONGEST)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[box.end() : at]
    return None


def plain(text: str) -> str:
    """Text without \\text{}, case, spaces around and the final stop: "\\text{Monday}." is monday."""
    return _TEXT.sub(r"\1", text).strip().strip("$.").strip().casefold()
