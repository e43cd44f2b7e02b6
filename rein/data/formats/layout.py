"""What a format is made of: layouts that recognise a row and read it, and the ledger of what became of it.

A layout reads one row of another tool into rows with Rein's columns (data/schemas.py). It takes cells
through `Source`, which notes what each became; what no layout takes goes to extra_info, so that nothing is
lost in silence. Knows no tool.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from rein.data import schemas as s
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.data.schemas import Kind

LARGEST: Final = 2**63
GROUP_TEXT: Final = 200  # a longer prompt is grouped by its hash, which the loader makes
_ANSWERS: Final = (
    "response",
    "responses",
    "response_ids",
    "completion",
    "completions",
    "output",
    "outputs",
    "choices",
    "chosen",
    "rejected",
    "solution",
    "solutions",
    "generations",
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the rows cannot say themselves."""

    temperature: float | None = None  # of rows that store none
    log_probs: str | None = None  # "raw" (at temperature 1) or "processed" (at the row's own)


@dataclass(slots=True)
class Ledger:
    """What became of every column, and what was noticed."""

    options: Options = field(default_factory=Options)
    became: dict[str, dict[str, None]] = field(default_factory=dict)  # source column -> Rein's columns
    left: dict[str, str] = field(default_factory=dict)  # source column -> why it is not carried
    noticed: Counter[str] = field(default_factory=Counter)  # what happened -> rows
    requests: Mapping[str, Any] = field(default_factory=dict)  # of another file: id -> request


class Source:
    """One row being read."""

    __slots__ = ("_noted", "_open", "ledger", "row")

    def __init__(self, row: Row, ledger: Ledger) -> None:
        self.row, self.ledger, self._noted = row, ledger, set[str]()
        self._open = {name for name, value in row.items() if not absent(value)}

    def peek(self, *names: str) -> Any:
        """The first of these columns that holds something; None where none does."""
        return next((self.row[name] for name in names if name in self._open), None)

    def take(self, to: str, *names: str) -> Any:
        """The same, noted as having become `to`."""
        for name in names:
            if name in self._open:
                self._open.discard(name)
                self.ledger.became.setdefault(name, {})[to] = None
                return self.row[name]
        return None

    def leave(self, why: str, *names: str) -> None:
        """These columns are not carried, for a reason that is said."""
        for name in names:
            if name in self._open:
                self._open.discard(name)
                self.ledger.left[name] = why

    def rest(self) -> dict[str, Any]:
        """What nobody took, for extra_info."""
        found = {name: self.row[name] for name in self.row if name in self._open}
        for name in found:
            self.ledger.became.setdefault(name, {})[s.EXTRA_INFO] = None
        return found

    def note(self, what: str) -> None:
        """Once a row."""
        if what not in self._noted:
            self._noted.add(what)
            self.ledger.noticed[what] += 1


@dataclass(frozen=True, slots=True)
class Layout:
    """One way in which a tool writes rows."""

    name: str  # "preferences with the prompt inside"
    kind: Kind  # what it becomes unless asked otherwise
    columns: str  # what it is known by, for messages
    fits: Callable[[Row], bool]
    read: Callable[[Source], list[Row]]  # raises BadRow
    refused: str = ""  # why rows of this layout cannot be used at all


@dataclass(frozen=True, slots=True)
class Format:
    """A tool's layouts, the more particular ones first."""

    about: str
    layouts: tuple[Layout, ...]


def absent(value: Any) -> bool:
    """Nothing is there: null, or NaN as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def bare(row: Row) -> bool:
    """The row holds no answer: a prompt and what stands around it."""
    return all(absent(row.get(name)) for name in _ANSWERS)


def has_any(row: Row, *names: str) -> bool:
    return any(not absent(row.get(name)) for name in names)


def first_of(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if not absent(row.get(name))), None)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_number(value: Any) -> TypeGuard[int | float]:
    """A number that is one, and fits a float."""
    return isinstance(value, int | float) and not absent(value) and abs(value) < LARGEST


def is_turns(value: Any) -> bool:
    """A list of chat messages, under either tool's words."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)
    )


def is_turn(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def score_of(value: Any, name: str) -> float | None:
    """A verdict as a number: true and false are 1 and 0; words that say so too."""
    if absent(value):
        return None
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _WORDS:
            return _WORDS[word]
        try:
            value = float(word)
        except ValueError as error:
            raise BadRow("no score", f"{name} is {value[:40]!r}, not a number or a verdict") from error
    if not isinstance(value, bool | int | float):
        raise BadRow("no score", f"{name} is a {type(value).__name__}, not a number or a verdict")
    score = float(value) if abs(value) < LARGEST else math.inf
    if not math.isfinite(score):
        raise BadRow("score not finite", f"{name} is {score:g}")
    return score


def scored(value: Any, name: str) -> float:
    """A verdict as a number, in a layout where every row has one."""
    score = score_of(value, name)
    if score is None:
        raise BadRow("no score", f"{name} is missing")
    return score


_WORDS: Final = dict.fromkeys(
    ("true", "yes", "correct", "right", "pass", "passed", "good", "chosen"), 1.0
) | (dict.fromkeys(("false", "no", "incorrect", "wrong", "fail", "failed", "bad", "rejected"), 0.0))


def whole_numbers(value: Any, name: str) -> list[int] | None:
    """Token ids; absent is None."""
    if absent(value):
        return None
    if isinstance(value, list) and all(type(i) is int and 0 <= i < LARGEST for i in value):
        return value
    raise BadRow("wrong type", f"{name} is no list of token ids")


def truth(value: Any, style: str = "rule") -> dict[str, Any] | None:
    """A ground truth where verl keeps it."""
    return None if absent(value) else {"style": style, s.GROUND_TRUTH: value}


def group_name(question: str) -> str | None:
    """The name that rows of one question share; None leaves it to the loader."""
    return question if 0 < len(question) <= GROUP_TEXT else None


def named(layouts: tuple[Layout, ...]) -> Iterator[str]:
    return (f"{layout.name} ({layout.columns})" for layout in layouts)
