"""Which files of rows a run has, and a page of one: texts as they may be read, numbers beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rein.errors import shown
from rein.report.figures import number
from rein.report.text import shown as readable
from rein.ui import pieces
from rein.ui.folder import Absent, Broken, Folder
from rein.ui.table import TEXTS, Query, Table, Tables

PLACES = (  # of a run's files, newest first
    ("evaluate", ("answers.parquet",)),
    ("train", ("held_out.parquet",)),
    ("score", ("trajectories.parquet",)),
    ("rollout", ("trajectories.parquet",)),
)
TOKENS = "train/tokens"
MOST_FILES = 2000
PAGE_ROWS, SNIPPET = 25, 280  # rows on a page; characters of a text there
NOTED = ("data_source", "finish_reason", "policy_version", "batch", "group")  # columns named beside a row


def files(folder: Folder, run: str) -> list[str]:
    """The names of the run's files of rows; only these can be opened."""
    found = [f"{stage}/{name}" for stage, names in PLACES for name in names]
    rounds = sorted(_names(folder, run, "round-"), key=lambda name: (len(name), name), reverse=True)
    found += [f"{r}/{stage}/trajectories.parquet" for r in rounds for stage in ("score", "rollout")]
    found = [name for name in found if folder.file(run, name)]
    inside = _names(folder, run, "", TOKENS)
    return [*found, *(f"{TOKENS}/{n}" for n in sorted(inside) if n.endswith(".parquet"))][:MOST_FILES]


def opened(folder: Folder, tables: Tables, run: str, file: str) -> Table:
    """Raises Absent where the run has no such file of rows."""
    path = folder.file(run, file) if file in files(folder, run) else None
    if path is None:
        raise Absent(f"{shown(file) or 'file'}: is no file of rows of this run")
    return tables.open(path)


def page(table: Table, query: Query, at: int) -> dict[str, Any]:
    """The rows of one page, and how many there are."""
    numbers = table.select(query)
    last = max(0, (len(numbers) - 1) // PAGE_ROWS)
    at = min(max(at, 0), last)
    here = [int(n) for n in numbers[at * PAGE_ROWS : (at + 1) * PAGE_ROWS]]
    names = table.measures()
    columns = {c for c in (*TEXTS, *NOTED) if c in table.schema.names}
    cheap = {name: m for name, m in names.items() if name in ("score", "before_score", "after_score")}
    columns |= {c for m in cheap.values() for c in m.columns}
    rows = table.take(here, sorted(columns))
    asked = {query.order, *(name for name, _, _ in query.bounds)} - {""} - set(cheap)
    texts = text_columns(table)
    return {
        "total": len(numbers),
        "all": table.rows,
        "at": at,
        "last": last,
        "rows": [
            {
                "number": n,
                "texts": [(name, snippet(row.get(name))) for name in texts],
                "figures": [(m.label, _figure(row.get(name))) for name, m in cheap.items()]
                + [(names[name].label, _figure(table.measure(name)[n])) for name in sorted(asked)],
                "notes": [(name, snippet(row[name], 60)) for name in NOTED if row.get(name) is not None],
            }
            for n, row in zip(here, rows, strict=True)
        ],
    }


def row(folder: Folder, run: str, file: str, table: Table, at: int, color: str, part: int) -> dict[str, Any]:
    """One row whole: its texts, its tokens in color where there are any, its other columns."""
    found = table.take([at]) if 0 <= at < table.rows else []
    if not found:
        raise Absent(f"row {at}: the file has {table.rows:,} rows, counted from 0")
    values, note = found[0], ""
    texts = pieces.from_file(values)
    if not texts and values.get("response_ids"):
        texts, note = _retold(folder, run, file, values)
    tokens = pieces.colored(values, texts, color, max(part, 0))
    lists = {"tokens", *(c for spec in pieces.COLORS.values() for c in spec.columns), "response_mask"}
    named = text_columns(table)
    return {
        "texts": [(name, as_text(values.get(name))) for name in named],
        "tokens": tokens,
        "note": note,
        "others": [
            (name, snippet(value, 600))
            for name, value in values.items()
            if value is not None and name not in named and not (tokens and name in lists)
        ],
    }


def text_columns(table: Table) -> list[str]:
    return [name for name in TEXTS if name in table.schema.names]


def as_text(value: Any) -> str:
    """A prompt or response as text: the turns of a chat one after the other."""
    if isinstance(value, str) and value.startswith(("[{", '"')):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        value = parsed if _is_chat(parsed) or isinstance(parsed, str) else value
    if _is_chat(value):
        value = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value)
    return "" if value is None else readable(value)


def snippet(value: Any, most: int = SNIPPET) -> str:
    text = as_text(value)
    return text if len(text) <= most else f"{text[:most]} …"


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) and "role" in v for v in value)
    )


def _figure(value: Any) -> str:
    if not isinstance(value, bool | int | float):
        return "–"
    found = float(value)
    return (
        number(int(found) if found.is_integer() and abs(found) < 1e15 else found) if found == found else "–"
    )


def _names(folder: Folder, run: str, beginning: str, inside: str = "") -> list[str]:
    try:
        place = folder.path(run, *([inside] if inside else []))
        return [p.name for p in place.iterdir() if p.name.startswith(beginning) and p.name.isprintable()]
    except (Absent, OSError):
        return []


def _retold(folder: Folder, run: str, file: str, values: Mapping[str, Any]) -> tuple[list[str], str]:
    """Pieces by a tokenizer that lies in the run, and what to say where there is none."""
    first = file.partition("/")[0]
    near = dict.fromkeys((first, "train", "sft", "."))
    places = [f"{a}/{b}/tokenizer.json" for a in near for b in ("actor", "best", "last", "model")]
    tried = False
    for place in places:
        if (path := folder.file(run, place.removeprefix("./"))) is not None:
            tried = True
            try:
                if texts := pieces.from_tokenizer(values, path):
                    return texts, ""
            except (Broken, OSError):
                continue
    why = "no tokenizer in the run gives this very text back" if tried else "no tokenizer lies in the run"
    return [], f"The tokens are not shown one by one: {why}."
