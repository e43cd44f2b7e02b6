"""What `rein convert` counts and says: what the files are, rows in and out, what became of every column."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rein.commands.convert_files import Rejects
from rein.data.files import Source as File
from rein.data.formats import Decision
from rein.data.formats.layout import Ledger
from rein.data.parquet import columns_of
from rein.data.schemas import Kind
from rein.tracking.console import Console


@dataclass(slots=True)
class Count:
    """rows = written + left out, in rows of the kind that is written (of pairs: in answers)."""

    read: int = 0  # rows of the files
    rows: int = 0  # what they hold: an answer each, where a row holds several
    used: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # no fault of the rows


def say_decisions(decisions: Sequence[tuple[File, Decision]], kind: Kind, console: Console) -> None:
    told = dict[str, list[str]]()
    for file, decision in decisions:
        layout, fits = decision.layout, f"{decision.fitting} of the first {decision.looked_at} rows"
        also = f"; also fits: {', '.join(decision.others)}" if decision.others else ""
        told.setdefault(
            f"{decision.form}, {layout.name}, a kind of {layout.kind}: {fits} have {layout.columns}{also}", []
        ).append(file.name)
    for what, names in told.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        console.say(f"{shown}: {what}")
    console.say(f"written as {kind}")


def say(
    path: Path,
    kind: Kind,
    found: Sequence[File],
    ledger: Ledger,
    count: Count,
    rejects: Rejects,
    console: Console,
) -> None:
    left = count.rows - count.used
    holding = "" if count.rows == count.read else f", holding {count.rows} answers"
    used = (
        f"{count.used} used in {count.written} pairs"
        if count.used != count.written
        else f"{count.written} written"
    )
    console.say(f"{path}: {count.read} rows in{holding} = {used} + {left} left out")
    for what, number in count.left_out.items():
        if number:
            console.say(f"  left out, {what}: {number}")
    if rejects.total:
        console.say(f"  left out, unusable: {rejects.summary(count.rows)}; all in {rejects.path}")
    console.say("columns:")
    for name, targets in ledger.became.items():
        console.say(f"  {name} -> {', '.join(targets)}")
    named = dict.fromkeys(name for file in found for name in columns_of(file))
    for name in named:
        if name not in ledger.became:
            console.say(
                f"  {name} not carried: {ledger.left.get(name, 'nothing in any row that is written')}"
            )
    for what, number in ledger.noticed.items():
        if number:
            console.say(f"note: {number} rows: {what}")
