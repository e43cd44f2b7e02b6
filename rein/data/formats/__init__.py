"""Other tools' files: FORMATS names them, `decide` says which layout a file has, and why.

One module a tool; each knows its own columns only. Nothing here writes files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from rein.data.formats.layout import Format, Layout, named
from rein.data.formats.llamafactory import LLAMAFACTORY
from rein.data.formats.openai import OPENAI
from rein.data.formats.openrlhf import OPENRLHF
from rein.data.formats.own import REIN
from rein.data.formats.solutions import SOLUTIONS
from rein.data.formats.trl import TRL
from rein.data.formats.verl import VERL
from rein.data.formats.vllm import VLLM
from rein.data.parquet import Row
from rein.errors import ConfigError, DataError

AUTO: Final = "auto"
ENOUGH: Final = 0.9  # of the rows looked at: then a more particular layout is theirs, and the others are odd
FORMATS: Final[dict[str, Format]] = {  # `auto` asks them in this order
    "vllm": VLLM,
    "openai": OPENAI,
    "verl": VERL,
    "llamafactory": LLAMAFACTORY,
    "trl": TRL,
    "rein": REIN,
    "solutions": SOLUTIONS,
    "openrlhf": OPENRLHF,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What a file is, and how much speaks for it."""

    form: str
    layout: Layout
    fitting: int  # of the rows looked at
    looked_at: int
    others: tuple[str, ...] = ()  # formats whose layouts fit as many rows


def decide(file: str, rows: Sequence[Row], form: str = AUTO) -> Decision:
    """The layout that the most of these rows have, or a more particular one that ENOUGH of them have.

    The more particular ones come first in FORMATS.

    Raises ConfigError for an unknown format, DataError where no layout fits, or one of no use.
    """
    if form != AUTO and form not in FORMATS:
        close = get_close_matches(form, [*FORMATS, AUTO], n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join([*FORMATS, AUTO])}"
        raise ConfigError(f"--from: {form!r} is unknown; {hint}")
    asked = FORMATS if form == AUTO else {form: FORMATS[form]}
    counts = [
        (name, layout, sum(map(layout.fits, rows)))
        for name, found in asked.items()
        for layout in found.layouts
    ]
    most = max((count for *_, count in counts), default=0)
    if not most:
        raise _undecidable(file, rows, form)
    enough = ENOUGH * len(rows)
    name, layout, count = next(
        (name, layout, count)
        for name, layout, count in counts
        if count == most or (count >= enough and not layout.refused)
    )
    if layout.refused:
        raise DataError(f"{file}: {name}, {layout.name}: {layout.refused}")
    equals = dict.fromkeys(other for other, _, fitting in counts if fitting >= count and other != name)
    return Decision(name, layout, count, len(rows), tuple(equals))


def _undecidable(file: str, rows: Sequence[Row], form: str) -> DataError:
    columns = ", ".join(dict.fromkeys(name for row in rows for name in row)) or "none"
    if form == AUTO:
        choices = "; ".join(f"{name}: {', '.join(named(found.layouts))}" for name, found in FORMATS.items())
        return DataError(
            f"{file}: no known layout (columns: {columns}); rename its columns or say "
            f"which with --from: {choices}"
        )
    fitting = [
        name
        for name, found in FORMATS.items()
        if any(layout.fits(row) for layout in found.layouts for row in rows)
    ]
    hint = f"its rows look like {' or '.join(fitting)}" if fitting else "no other format knows them either"
    return DataError(
        f"{file}: no layout of {form} (columns: {columns}); {hint}; {form} has: "
        f"{', '.join(named(FORMATS[form].layouts))}"
    )
