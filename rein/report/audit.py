"""An audit's facts in, its page out: all sections in order, as HTML and as the lines of a terminal.

Facts are the dict of rein.data.audit.FACTS as JSON holds it. `facts["verdict"]`, where there is one, is
{word, tone (good, even, bad), sentences} and comes first.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rein.report import audit_model, audit_rows, audit_signals
from rein.report.html import json_for_script
from rein.report.section import Bars, Facts, Section
from rein.report.text import shown

SECTIONS: Final[tuple[Callable[[Facts], Section | None], ...]] = (
    audit_rows.rows,
    audit_model.model,
    audit_model.by_part,
    audit_signals.score,
    audit_signals.groups,
    audit_signals.pairs,
    audit_signals.behavior,
    audit_rows.lengths,
    audit_rows.endings,
    audit_rows.duplicates,
    audit_rows.overlap,
    audit_signals.text,
    audit_signals.names,
)
TEMPLATE = "audit.html"
CELL = 200  # characters of a cell that are shown
WIDEST = 34  # of a name at the terminal


def sections(facts: Facts) -> list[Section]:
    """Those that have something to say."""
    return [section for make in SECTIONS if (section := make(facts)) is not None]


def lines(facts: Facts, made: Sequence[Section]) -> Iterator[str]:
    """The page at the terminal: numbers, and what asks for attention; explanations are on the HTML page."""
    if verdict := facts["verdict"]:
        yield f"{verdict['word']}: {' '.join(verdict['sentences'])}"
    for section in made:
        if not section.rows and not section.warnings:
            yield from (f"{section.title}: {_one_line(said)}" for said in section.sentences)
            continue
        yield section.title
        width = min(WIDEST, max((len(row.name) for row in section.rows), default=0))
        for row in section.rows:
            note = f"  ({_one_line(row.note)})" if row.note else ""
            yield f"  {_one_line(row.name):<{width}}  {_one_line(row.value)}{note}"
        yield from (f"  ! {_one_line(warning)}" for warning in section.warnings)


def render(facts: Facts, made: Sequence[Section], title: str) -> str:
    """The whole page as HTML."""
    from plotly.offline import get_plotlyjs  # takes a moment: only when a page is made

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"cell": _cell}
    charts = [_drawn(chart) for section in made for chart in section.charts]
    return environment.get_template(TEMPLATE).render(
        title=title,
        verdict=facts["verdict"],
        total=facts["rows"]["total"],
        usable=facts["rows"]["usable"],
        kind=facts["kind"],
        sections=made,
        warnings=sum(len(section.warnings) for section in made),
        chart_data=json_for_script(charts),
        facts=json.dumps(facts, ensure_ascii=False, indent=1).encode("utf-8", "replace").decode("utf-8"),
        plotly=Markup(get_plotlyjs()),
        nonce=secrets.token_urlsafe(16),
    )


def _drawn(chart: Bars) -> dict[str, object]:
    found = asdict(chart)
    if chart.width is None:
        found["x"] = [_cell(str(name))[:40] for name in chart.x]
    return found


def _cell(text: str) -> str:
    """Text of other people's files on a page: short, on one line, without control characters."""
    return shown(_one_line(text))


def _one_line(text: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * CELL]).split())
    return text if len(text) <= CELL else f"{text[:CELL]} …"
