"""`rein convert IN... OUT`: other tools' files in, a file of one of Rein's kinds out, nothing silently lost.

Rows are streamed; only pairs made of scored answers are gathered first. OUT is written complete or not at
all, rejects beside it as OUT.rejects.jsonl. The layouts are in data/formats; this decides, counts and says.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from rein.commands.convert_files import Rejects, Requests, write
from rein.commands.convert_report import Count, say, say_decisions
from rein.data import schemas as s
from rein.data.files import Source as File
from rein.data.files import sources, unread
from rein.data.formats import AUTO, Decision, decide
from rein.data.formats.chat import keep_tools
from rein.data.formats.kinds import as_kind, for_pairs, pairs_of, prompt_name
from rein.data.formats.layout import Ledger, Options, Source, absent
from rein.data.parquet import Row, source_rows
from rein.data.rejects import BadRow
from rein.data.schemas import Kind
from rein.errors import ConfigError, DataError
from rein.tables import nearest
from rein.tracking.console import Console

KINDS: Final[tuple[Kind, ...]] = ("prompts", "trajectories", "preferences", "sft")
LOG_PROBS: Final = ("raw", "processed")
LOOKED_AT: Final = 50  # rows that decide what a file is
CONTEXT: Final = (s.DATA_SOURCE, s.ABILITY, s.REWARD_MODEL)


def run_words(words: Namespace, console: Console) -> None:
    """The command line's words, all text; raises ConfigError for a value of the wrong kind."""
    *files, out = words.files
    if not files:
        raise ConfigError("convert: give the files to read, then the file to write: rein convert IN OUT")
    given = {
        name: _number(getattr(words, name), f"--{name.replace('_', '-')}")
        for name in ("limit", "max_bad_fraction", "temperature")
    }
    run(
        files,
        out,
        console,
        form=getattr(words, "from") or AUTO,
        to=words.to,
        limit=None if given["limit"] is None else int(given["limit"]),
        max_bad_fraction=0.01 if given["max_bad_fraction"] is None else given["max_bad_fraction"],
        options=Options(given["temperature"], words.log_probs),
        force=words.force,
    )


def run(
    files: Sequence[str],
    out: str,
    console: Console,
    *,
    form: str = AUTO,
    to: str | None = None,
    max_bad_fraction: float = 0.01,
    limit: int | None = None,
    options: Options | None = None,
    force: bool = False,  # overwrite `out`
) -> None:
    """Convert the files; raises DataError where a layout is unknown or too many rows are unusable."""
    path = Path(out)
    options = options or Options()
    _check(path, to, max_bad_fraction, options)
    found = sources(list(files))
    for line in unread(files):
        console.say(f"note: {line}")
    if any(file.path.resolve() == path.resolve() for file in found):
        raise ConfigError(f"{out}: is among the files to read; write to another name")
    if path.exists() and not force:
        raise ConfigError(f"{out}: exists already; name a new file last, or overwrite it with --force")
    decisions = [(file, _decided(file, form)) for file in found]
    asked = {file.name for file, decision in decisions if decision.layout.name == "batch input"}
    answers = [(file, decision) for file, decision in decisions if file.name not in asked]
    joined = bool(asked) and any(decision.layout.name == "batch output" for _, decision in answers)
    kind = _kind(answers if joined else decisions, to)
    say_decisions(decisions, kind, console)
    ledger, count = Ledger(options), Count()
    with Rejects(path) as rejects, Requests() as requests:
        if joined:
            requests.read([file for file in found if file.name in asked])
            ledger.requests = requests
            console.say(f"{len(requests)} requests of {', '.join(sorted(asked))} are joined by custom_id")
        rows = _rows(answers if joined else decisions, kind, ledger, count, rejects, limit)
        write(path, _judged(rows, path, count, rejects, max_bad_fraction), kind)
        rejects.keep()
    say(path, kind, found, ledger, count, rejects, console)


def _rows(
    decisions: Sequence[tuple[File, Decision]],
    kind: Kind,
    ledger: Ledger,
    count: Count,
    rejects: Rejects,
    limit: int | None,
) -> Iterator[Row]:
    """The rows to write, in the files' order; of pairs and prompts made of answers, prompt by prompt."""
    read = islice(_source_rows(decisions, rejects, count), limit)
    if kind == "preferences" and any(d.layout.kind != "preferences" for _, d in decisions):
        answers = _converted(read, "trajectories", ledger, count, rejects, ranked=True)
        for row, used in pairs_of(answers):
            count.written, count.used = count.written + 1, count.used + used
            yield row
        count.left_out["in no pair: alone, or scored or worded like the other"] = (
            count.rows - count.used - rejects.total
        )
        return
    seen, several = set[int](), kind == "prompts" and any(d.layout.kind != "prompts" for _, d in decisions)
    for row in _converted(read, kind, ledger, count, rejects):
        if several and (name := hash(prompt_name(row))) in seen:
            count.left_out["a prompt that was written before"] += 1
            continue
        if several:
            seen.add(name)
        count.written, count.used = count.written + 1, count.used + 1
        yield row


def _converted(
    read: Iterator[tuple[str, Row, Decision]],
    kind: Kind,
    ledger: Ledger,
    count: Count,
    rejects: Rejects,
    *,
    ranked: bool = False,
) -> Iterator[Row]:
    """Every row as rows of the kind; one that cannot be used is rejected, its neighbors stay."""
    for where, row, decision in read:
        source = Source(row, ledger)
        try:
            held = decision.layout.read(source)
            if not held:
                raise BadRow("no answer", "the row holds no answer")
            held = _with_context(held, source)
        except BadRow as bad:
            count.rows += 1
            rejects.add(where, bad)
            continue
        for i, one in enumerate(held):
            place = where if len(held) == 1 else f"{where} answer {i}"
            try:
                made = [for_pairs(row) if ranked else row for row in as_kind(one, kind, ledger)]
            except BadRow as bad:
                count.rows += 1
                rejects.add(place, bad)
                continue
            count.rows += len(made)
            yield from made


def _with_context(rows: list[Row], source: Source) -> list[Row]:
    """Each row with verl's columns as they are, and in extra_info what no layout took."""
    wanted = [name for name in CONTEXT if any(absent(row.get(name)) for row in rows)]
    beside = {s.TOOLS: keep_tools(source)} | {name: source.take(name, name) for name in wanted}
    own = source.take(s.EXTRA_INFO, s.EXTRA_INFO)
    held = own if isinstance(own, dict) else {} if own is None else {s.EXTRA_INFO: own}
    rest = {**source.rest(), **held}
    given = [{name: value for name, value in row.items() if not absent(value)} for row in rows]
    return [{**beside, **row, s.EXTRA_INFO: {**rest, **row.get(s.EXTRA_INFO, {})} or None} for row in given]


def _source_rows(
    decisions: Sequence[tuple[File, Decision]], rejects: Rejects, count: Count
) -> Iterator[tuple[str, Row, Decision]]:
    def unreadable(where: str, reason: str) -> None:
        count.read, count.rows = count.read + 1, count.rows + 1
        rejects.add(where, BadRow("unreadable", reason))

    for file, decision in decisions:
        for where, row in source_rows(file, None, unreadable):
            count.read += 1
            yield where, row, decision


def _judged(
    rows: Iterator[Row], path: Path, count: Count, rejects: Rejects, max_bad_fraction: float
) -> Iterator[Row]:
    """The same rows; after the last one raises DataError where too many could not be used."""
    yield from rows
    left_out = count.left_out.total() + rejects.total
    assert count.rows == count.used + left_out, (count, rejects.total)
    if count.rows and rejects.total > max_bad_fraction * count.rows:
        rejects.keep()
        raise DataError(
            f"{path.name}: not written, unusable: {rejects.summary(count.rows)}; mend them (all are in "
            f"{rejects.path.name}) or raise --max-bad-fraction ({max_bad_fraction:g})"
        )
    if not count.written:
        rejects.keep()
        why = ", ".join(f"{n} {what}" for what, n in count.left_out.items() if n)
        if rejects.total:
            unusable = f"unusable: {rejects.summary(count.rows)}, all in {rejects.path.name}"
            why = f"{why}, {unusable}" if why else unusable
        why = why or "the files have no rows"
        raise DataError(f"{path.name}: not written, nothing is left: {why}; give a file with usable rows")


def _check(path: Path, to: str | None, max_bad_fraction: float, options: Options) -> None:
    if path.suffix.lower() not in (".parquet", ".jsonl"):
        raise ConfigError(f"{path}: OUT ends in neither .parquet nor .jsonl; name the file to write last")
    if to is not None and to not in KINDS:
        raise ConfigError(f"--to: {to!r} is unknown; {nearest(to, KINDS)}")
    if not 0 <= max_bad_fraction <= 1:
        raise ConfigError(
            f"--max-bad-fraction: {max_bad_fraction:g} is not in [0, 1]; give a share of the rows"
        )
    if options.log_probs not in (None, *LOG_PROBS):
        raise ConfigError(
            f"--log-probs: {options.log_probs!r} is unknown; {nearest(options.log_probs, LOG_PROBS)}"
        )


def _number(value: str | None, option: str) -> float | None:
    try:
        found = None if value is None else float(value)
    except ValueError as error:
        raise ConfigError(f"{option}: {value!r} is not a number; give one") from error
    if found is not None and not (math.isfinite(found) and found >= 0):
        raise ConfigError(f"{option}: {value} is negative or not finite; give a number from 0 up")
    return found


def _decided(file: File, form: str) -> Decision:
    rows = [row for _, row in islice(source_rows(file, None, lambda where, reason: None), LOOKED_AT)]
    if not rows:
        raise DataError(
            f"{file.name}: no row that can be read; give a file of JSON objects or a Parquet table"
        )
    return decide(file.name, rows, form)


def _kind(decisions: Sequence[tuple[File, Decision]], to: str | None) -> Kind:
    """What is written: as asked, else what the files are."""
    natural = dict.fromkeys(decision.layout.kind for _, decision in decisions)
    asked = [kind for kind in KINDS if kind == to]
    if not asked and len(natural) > 1:
        each = "; ".join(f"{file.name}: {decision.layout.kind}" for file, decision in decisions[:4])
        raise DataError(f"the files are of several kinds ({each}); convert them apart or say which with --to")
    kind = [*asked, *natural][0]
    if kind == "preferences" and set(natural) & {"sft", "prompts"}:
        raise DataError(
            f"a file of {' and '.join(natural)} has no worse answers, so it holds no preferences; "
            "give scored answers or pairs"
        )
    return kind
