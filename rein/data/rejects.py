"""What happens to a row that cannot be used: it is named, counted and written down; too many stop the stage.

Knows no format: the readers of rows say what is wrong, this says what follows.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Generic, TypeVar

from rein.data.files import atomic
from rein.errors import DataError, shown

Item = TypeVar("Item")

LIMIT_KINDS: Final = (
    "prompt over the limit",
    "response over the limit",
)  # set by the recipe, no fault of the file
DUPLICATE: Final = "duplicate"  # no fault either: the recipe asks for one of each
NAMED: Final = 3
PLACE = re.compile(r"(.*) (row|line) (\d+)( chosen| rejected)?", re.DOTALL)


class BadRow(DataError):
    """One row cannot be used. `kind` is what it is counted under, `reason` what is wrong with this one."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, shown(reason, 300)
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True)
class Reject:
    """A row left out. Reject("part-003.parquet row 118", "the response has no tokens", "no tokens")"""

    where: str
    reason: str
    kind: str = "other"

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


@dataclass(slots=True)
class Loaded(Generic[Item]):
    """What was read: len(rows) + len(rejects) == total. `notes` are lines for the person at the terminal."""

    rows: list[Item]
    rejects: list[Reject]
    total: int
    notes: list[str] = field(default_factory=list)


class TooManyBad(DataError):
    """More rows are unusable than data.max_bad_fraction allows."""

    def __init__(self, message: str, rejects: Sequence[Reject]) -> None:
        super().__init__(message)
        self.rejects = list(rejects)


def judge(
    names: str, rejects: Sequence[Reject], total: int, *, max_bad_fraction: float, truncation: str
) -> list[str]:
    """The lines to say about the rejects; raises where they are too many, or where nothing is left.

    A row over a length limit is no fault of the file: it is dropped and named, or with
    data.truncation=error refused.
    """
    long = [reject for reject in rejects if reject.kind in LIMIT_KINDS]
    same = [reject for reject in rejects if reject.kind == DUPLICATE]
    bad = [reject for reject in rejects if reject.kind not in (*LIMIT_KINDS, DUPLICATE)]
    if long and truncation == "error":
        do = "raise the limit, shorten these rows, or set data.truncation=drop"
        raise TooManyBad(f"{names}: too long: {_summary(long, total)}; {do}", rejects)
    if total and len(bad) / total > max_bad_fraction:
        do = f"mend them or raise data.max_bad_fraction ({max_bad_fraction:g})"
        raise TooManyBad(f"{names}: unusable: {_summary(bad, total)}; {do}", rejects)
    if len(rejects) >= total:
        do = (
            "give a file with usable rows"
            if bad or not total
            else "raise data.max_prompt_length or data.max_response_length"
        )
        raise TooManyBad(f"{names}: nothing is left: {_summary(rejects, total)}; {do}", rejects)
    return [f"{names}: left out: {_summary(group, total)}" for group in (bad, long, same) if group]


def write_rejects(path: Path | str, rejects: Iterable[Reject]) -> None:
    """Write rejects.jsonl: one object a line with where (and its file and row), kind, reason; an empty file
    says there are none.
    """
    found = [{"where": r.where, **_place(r.where), "kind": r.kind, "reason": r.reason} for r in rejects]
    lines = [json.dumps(each, ensure_ascii=False) for each in found]
    with atomic(Path(path)) as draft:
        draft.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="replace")


@contextmanager
def rejects_kept(path: Path | None) -> Iterator[None]:
    """Around loading: where too many rows are unusable, all are written down before the stage stops."""
    try:
        yield
    except TooManyBad as error:
        if path is None:
            raise
        write_rejects(path, error.rejects)
        raise TooManyBad(f"{error}; all are named in {path}", error.rejects) from error


def _place(where: str) -> dict[str, str | int]:
    """The file and the number in it: rows count from 0, lines from 1."""
    found = PLACE.fullmatch(where)
    return {"file": found[1], found[2]: int(found[3])} if found else {}


def _summary(rejects: Sequence[Reject], total: int) -> str:
    if not rejects:
        return "no rows"
    counts = Counter(reject.kind for reject in rejects).most_common()
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts)
    first = " | ".join(str(reject) for reject in rejects[:NAMED])
    return f"{len(rejects)} of {total} rows ({kinds}); first: {first}"
