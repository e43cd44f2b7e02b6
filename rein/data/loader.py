"""Files in, typed rows out, with every row accounted for: len(rows) + len(rejects) == total.

One loader serves training and whatever looks at data before it. A row that cannot be used becomes a Reject
that says where and why; more than data.max_bad_fraction of them raise DataError (data/rejects.py). What a
row of each kind means is in rows_*.py; this knows which columns a file must have, and what to say where it
lacks them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rein.config.recipe import Data
from rein.data import cells
from rein.data import schemas as s
from rein.data.files import Files, Source, sources
from rein.data.parquet import Row, columns_of, no_rows, source_rows
from rein.data.rejects import DUPLICATE, BadRow, Loaded, Reject, judge, rejects_kept, write_rejects
from rein.data.rows_pairs import read_both, read_pair
from rein.data.rows_prompts import Reading, read_prompt
from rein.data.rows_sft import read_demonstration
from rein.data.rows_trajectories import read_trajectory
from rein.data.tokenize import Encoder
from rein.types import Demonstration, PreferencePair, Prompt, Trajectory

__all__ = [
    "Loaded",
    "Reject",
    "load_demonstrations",
    "load_pairs",
    "load_prompts",
    "load_trajectories",
    "rejects_kept",
    "write_rejects",
]

Item = TypeVar("Item")
Reader = Callable[[str, Row], list[Item | Reject]]
# A file and its columns -> the columns read, how, and what a row of the file is as rows of ours.
Way = tuple[set[str], Reader[Item], tuple[str, ...]]
Choose = Callable[[Source, list[str]], Way[Item]]
ONE: tuple[str, ...] = ("",)

_CONTEXT = {s.REWARD_MODEL, s.GROUND_TRUTH, s.DATA_SOURCE, s.EXTRA_INFO}
_PROMPT_COLUMNS = {s.PROMPT, s.PROMPT_IDS, s.TOOLS, *_CONTEXT}
_TRAJECTORY_COLUMNS = {*s.TRAJECTORIES.names, *_CONTEXT} - {s.ABILITY}
_PAIR_COLUMNS = {s.PROMPT, s.CHOSEN, s.REJECTED, s.MARGIN, s.GROUP, s.TOOLS, *_CONTEXT}
NAMES_SHOWN = 3
_TOKENS = ("prompt_ids", "response_ids", "response_mask", "chosen_ids", "rejected_ids")


def load_prompts(files: Files, encoder: Encoder, data: Data) -> Loaded[Prompt]:
    """Prompts in verl's layout: messages, JSON text of them, or one user turn."""
    reading = Reading(encoder, data)
    return _collect(files, reading, prompts_reader(reading))


def load_trajectories(
    files: Files, encoder: Encoder, data: Data, *, scored: bool = False, ranked: bool = False
) -> Loaded[Trajectory]:
    """Stored responses; of a preferences file both responses, unscored and of unknown behavior.

    `scored` rejects rows without a score; `ranked` scores chosen 1 and rejected 0. Raises DataError for a
    file of bare prompts, and where data.behavior is `stored` but nothing is.
    """
    reading = Reading(encoder, data)
    return _collect(files, reading, trajectories_reader(reading, scored=scored, ranked=ranked))


def load_pairs(files: Files, encoder: Encoder, data: Data) -> Loaded[PreferencePair]:
    """Preference pairs, in any of the three layouts of rows_pairs."""
    reading = Reading(encoder, data)
    return _collect(files, reading, pairs_reader(reading))


def load_demonstrations(
    files: Files,
    encoder: Encoder,
    data: Data,
    *,
    prompt_key: str = s.PROMPT,
    response_key: str = s.RESPONSE,
) -> Loaded[Demonstration]:
    """Rows to imitate: prompt and response under the keys given (dots reach into structs), or `messages`."""
    reading = Reading(encoder, data)
    before = encoder.untrained_turns.total()
    loaded = _collect(files, reading, demonstrations_reader(reading, prompt_key, response_key))
    if skipped := encoder.untrained_turns.total() - before:
        loaded.notes.append(
            f"{skipped} earlier assistant turns are rewritten by the chat template: not trained"
        )
    return loaded


def prompts_reader(reading: Reading) -> Choose[Prompt]:
    """How load_prompts reads a file."""

    def choose(source: Source, columns: list[str]) -> Way[Prompt]:
        _need(source, columns, (s.PROMPT, s.PROMPT_IDS))
        return _PROMPT_COLUMNS, lambda where, row: [read_prompt(where, row, reading)], ONE

    return choose


def trajectories_reader(reading: Reading, *, scored: bool, ranked: bool) -> Choose[Trajectory]:
    """How load_trajectories reads a file."""

    def choose(source: Source, columns: list[str]) -> Way[Trajectory]:
        pairs = {s.CHOSEN, s.REJECTED} <= set(columns)
        if not pairs:
            rollout = "add rollout to `stages`, or give a file that has responses"
            _need(source, columns, (s.RESPONSE, s.RESPONSE_IDS), rollout)
            _need(source, columns, (s.PROMPT, s.PROMPT_IDS))
        if scored and not (pairs and ranked):
            scores = s.SCORE, s.TOKEN_LEVEL_SCORES, s.TURN_SCORES
            _need(source, columns, scores, "add score to `stages`, or store scores")
        if reading.data.behavior == "stored":
            _need(source, columns, (s.BEHAVIOR_LOG_PROBS,), "or set data.behavior=unknown")
        if pairs:
            both = f" {s.CHOSEN}", f" {s.REJECTED}"
            return _PAIR_COLUMNS, lambda where, row: read_both(where, row, reading, ranked=ranked), both
        wanted = _TRAJECTORY_COLUMNS
        return wanted, lambda where, row: [read_trajectory(where, row, reading, scored=scored)], ONE

    return choose


def pairs_reader(reading: Reading) -> Choose[PreferencePair]:
    """How load_pairs reads a file."""

    def choose(source: Source, columns: list[str]) -> Way[PreferencePair]:
        _need(source, columns, (s.CHOSEN,))
        _need(source, columns, (s.REJECTED,))
        return _PAIR_COLUMNS, lambda where, row: [read_pair(where, row, reading)], ONE

    return choose


def demonstrations_reader(reading: Reading, prompt_key: str, response_key: str) -> Choose[Demonstration]:
    """How load_demonstrations reads a file."""
    roots = {prompt_key, prompt_key.partition(".")[0], response_key, response_key.partition(".")[0]}

    def choose(source: Source, columns: list[str]) -> Way[Demonstration]:
        if s.MESSAGES not in columns and not (response_key == s.RESPONSE and s.RESPONSE_IDS in columns):
            for key, name in ((prompt_key, "sft.prompt_key"), (response_key, "sft.response_key")):
                root = key if key in columns else key.partition(".")[0]
                _need(source, columns, (root,), f"or set {name} to the column to use")
        ids = {s.PROMPT_IDS, s.RESPONSE_IDS, s.RESPONSE_MASK}
        wanted = {*roots, s.MESSAGES, s.PROMPT, s.TOOLS, *ids}
        keys = {"prompt_key": prompt_key, "response_key": response_key}
        return wanted, lambda where, row: [read_demonstration(where, row, reading, **keys)], ONE

    return choose


def stream(
    found: list[Source],
    choose: Choose[Item],
    *,
    most: int | None = None,  # copies of a row that are kept
) -> Iterator[Item | Reject]:
    """Every row as what it is or why it cannot be used, in the files' order, a row group at a time."""
    seen: dict[bytes, list[str]] = {}  # where a row stood first, and each further time that it was kept
    for source in found:
        columns, unreadable = columns_of(source), list[Reject]()
        if not columns:  # JSON without a single object: each row says so itself
            columns = [s.PROMPT, s.RESPONSE, s.CHOSEN, s.REJECTED, s.MESSAGES]
        wanted, read, sides = choose(source, columns)

        def bad(
            where: str, reason: str, into: list[Reject] = unreadable, sides: tuple[str, ...] = sides
        ) -> None:
            into.extend(Reject(f"{where}{side}", reason, "unreadable") for side in sides)

        for where, row in source_rows(source, wanted, bad):
            yield from unreadable
            unreadable.clear()
            try:
                items = read(where, {name: cells.decoded(value) for name, value in row.items()})
            except BadRow as wrong:
                items = [Reject(where, wrong.reason, wrong.kind)]
            if most is not None and not any(isinstance(item, Reject) for item in items):
                kept = seen.setdefault(_tokens(items), [])
                if len(kept) >= most:
                    reason = f"the same tokens as {kept[0]}"
                    items = [Reject(f"{where}{side}", reason, DUPLICATE) for side in sides]
                else:
                    kept.append(where)
            yield from items
        yield from unreadable


def _collect(files: Files, reading: Reading, choose: Choose[Item]) -> Loaded[Item]:
    found, data = sources(files), reading.data
    loaded = Loaded[Item]([], [], 0)
    for item in stream(found, choose, most=1 if data.drop_duplicates else data.max_copies):
        if isinstance(item, Reject):
            loaded.rejects.append(item)
        else:
            loaded.rows.append(item)
    loaded.total = len(loaded.rows) + len(loaded.rejects)
    if not loaded.total:
        raise no_rows(found)
    names = ", ".join(source.name for source in found[:NAMES_SHOWN])
    names += f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
    loaded.notes += judge(
        names,
        loaded.rejects,
        loaded.total,
        max_bad_fraction=data.max_bad_fraction,
        truncation=data.truncation,
    )
    for what, count in reading.noticed.items():
        if count:
            loaded.notes.append(f"{names}: {count} of {loaded.total} rows: {what}")
    return loaded


def _tokens(items: Sequence[object]) -> bytes:
    """What is read of a row of a file, as a hash."""
    digest = hashlib.blake2b(digest_size=16)
    for item in items:
        for name in _TOKENS:
            part = getattr(item, name, None)
            digest.update(b"-" if part is None else len(part).to_bytes(8, "little") + part.tobytes())
    return digest.digest()


def _need(source: Source, columns: list[str], any_of: tuple[str, ...], do: str = "") -> None:
    """Raise DataError, naming the nearest column, where the file has none of these."""
    if not set(any_of) & set(columns):
        raise s.missing(source.name, any_of[0], columns, do)
