"""Other tools' files: FORMATS names them, `decide` says which layout a file has, and why.

One module a tool; each knows its own columns only. Nothing here writes files.
"""

import re
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
from rein.errors import ConfigError, DataError, shown

AUTO: Final = "auto"
COLUMNS_SHOWN, NEAREST_SHOWN, CLOSE = 100, 2, 0.75  # where nothing fits: characters, layouts, likeness
NO_COLUMNS: Final = {"or", "with", "one", "column", "a", "model", "and", "n"}  # words between the names
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
    columns = list(dict.fromkeys(name for row in rows for name in row))
    has = f"columns: {shown(', '.join(columns), COLUMNS_SHOWN) or 'none'}"
    if form == AUTO:
        near = "; ".join(_nearest(columns)) or "none"
        return DataError(
            f"{file}: no known layout ({has}); nearest: {near}; rename or mend its columns, or see all "
            f"layouts of a tool with --from {'|'.join(FORMATS)}"
        )
    fitting = [
        name
        for name, found in FORMATS.items()
        if any(layout.fits(row) for layout in found.layouts for row in rows)
    ]
    hint = f"its rows look like {' or '.join(fitting)}" if fitting else "no other format knows them either"
    return DataError(
        f"{file}: no layout of {form} ({has}); {hint}; {form} has: {', '.join(named(FORMATS[form].layouts))}"
    )


def _nearest(columns: Sequence[str]) -> list[str]:
    """The layouts of which the largest share of columns stands here, under nearly the same names."""
    near = dict[str, tuple[float, int, str]]()
    for name, found in FORMATS.items():
        for layout, said in zip(found.layouts, named(found.layouts), strict=True):
            wanted = set(re.findall(r"\w+", layout.columns)) - NO_COLUMNS
            close = sum(bool(get_close_matches(word, columns, n=1, cutoff=CLOSE)) for word in wanted)
            if close and not layout.refused:
                near.setdefault(layout.columns, (close / len(wanted), close, f"{name}, {said}"))
    best = sorted(near.values(), key=lambda one: one[:2], reverse=True)
    return [said for *_, said in best[:NEAREST_SHOWN]]
