"""Files that nobody should have written, through the loader as the stages use it: `make fuzz SEED=0 N=5000`.

Each file may load, with every row kept or rejected, or be refused in one line by a ReinError. Anything else
is a finding: another exception, a hang, a dead process, too much memory, a row that is in neither list.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from fuzz_files import Case, make

from rein.config.recipe import Data
from rein.data import loader, schemas, token_marks
from rein.data.files import sources
from rein.data.parquet import columns_of, read_rows, write_rows
from rein.data.tokenize import Encoder
from rein.errors import ReinError
from rein.models.tiny import tiny_tokenizer
from rein.stages import score
from rein.types import Trajectory

sys.modules.setdefault("dateutil", None)  # type: ignore[arg-type]  # pyarrow looks for it at each array
SECONDS = 10  # a file may take
MEBIBYTES = 600  # a file may take beyond what the process has

CHAT = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
Call = Callable[[Path, Encoder, Data], "loader.Loaded[Any]"]


@dataclass(frozen=True)
class Entry:
    """One way into the loader: the kinds of files it is tried on, and rows made of one row of the file."""

    call: Call
    kinds: tuple[str, ...]
    rows_of_one: int = 1


def _two_texts(path: Path, encoder: Encoder, data: Data) -> loader.Loaded[Any]:
    return loader.load_demonstrations(
        path, encoder, data, prompt_key="extra_info.split", response_key="prompt"
    )


ALL = ("prompts", "trajectories", "preferences", "sft")
ENTRIES: dict[str, Entry] = {
    "prompts": Entry(loader.load_prompts, ALL),
    "trajectories": Entry(loader.load_trajectories, ("prompts", "trajectories", "sft")),
    "trajectories, scored": Entry(
        lambda path, encoder, data: loader.load_trajectories(path, encoder, data, scored=True),
        ("trajectories", "sft"),
    ),
    "trajectories of pairs": Entry(
        lambda path, encoder, data: loader.load_trajectories(path, encoder, data, ranked=True),
        ("preferences",),
        rows_of_one=2,
    ),
    "pairs": Entry(loader.load_pairs, ("preferences", "prompts")),
    "demonstrations": Entry(loader.load_demonstrations, ALL),
    "demonstrations of other columns": Entry(_two_texts, ("prompts", "trajectories")),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"behavior": "stored"},
    {"behavior": "unknown"},
    {"truncation": "error"},
    {"max_bad_fraction": 0.01},
    {"max_prompt_length": 8},
    {"max_prompt_length": 8, "truncation": "left"},
    {"max_prompt_length": 8, "truncation": "right"},
    {"drop_duplicates": True},
    {"truncation": "left", "drop_duplicates": True, "max_bad_fraction": 0.3},
)


class TooSlow(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


class Fuzzer:
    """Makes the files of a seed one by one and says what is wrong with what the loader made of each."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        raw, chat = tiny_tokenizer(), tiny_tokenizer()
        chat.chat_template = CHAT
        self.encoders = [Encoder(t, apply_chat_template=None, stop_ids={1}) for t in (raw, chat)]

    def findings(self, number: int) -> tuple[list[str], Counter[str]]:
        """What is wrong, one text a finding, and how each entry ended."""
        case = make(self.seed, number, self.folder)
        wrong, ends = list[str](), Counter[str]()
        encoder = self.encoders[number // 4 % 2]
        limits: dict[str, Any] = {"max_prompt_length": 64, "max_response_length": 64, "max_bad_fraction": 1.0}
        data = Data(**limits | SETTINGS[number // 8 % len(SETTINGS)])
        before = _peak()
        for name, entry in ENTRIES.items():
            if case.kind in entry.kinds:
                ends[self._one(case, name, entry, encoder, data, wrong)] += 1
        if _peak() - before > MEBIBYTES:
            wrong.append(f"took {_peak() - before} MiB")
        if not wrong:
            case.path.unlink()
        about = f"seed {self.seed} file {number} ({case.kind}: {case.did}), {case.path}"
        return [f"{about}, {said}" for said in wrong], ends

    def _one(
        self, case: Case, name: str, entry: Entry, encoder: Encoder, data: Data, wrong: list[str]
    ) -> str:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            loaded = entry.call(case.path, encoder, data)
            wrong += [f"{name}: {said}" for said in _amiss(loaded, case, entry, data, encoder)]
            if loaded.rows and isinstance(loaded.rows[0], Trajectory) and case.number % 3 == 0:
                wrong += [f"{name}: {said}" for said in self._again(loaded.rows, encoder, data)]
                wrong += [f"{name}: {said}" for said in self._scored(case, loaded.rows, encoder)]
            end = "loaded, some rejected" if loaded.rejects else "loaded"
        except ReinError as error:
            said = str(error)
            if len(said.splitlines()) != 1 or len(said) > 3000 or not said.isprintable():
                wrong.append(f"{name}: not a line: {said[:300]!r} ({len(said)} characters)")
            end = type(error).__name__
        except TooSlow:
            wrong.append(f"{name}: took more than {SECONDS} s")
            end = "too slow"
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc()}")
            end = "crash"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return end

    def _again(self, rows: list[Any], encoder: Encoder, data: Data) -> Iterator[str]:
        """Rows that loaded can be written, and load again as the same rows."""
        path = self.folder / "again.parquet"
        write_rows(path, [schemas.trajectory_row(row) for row in rows], schemas.TRAJECTORIES)
        given = data.model_copy(update={"behavior": None, "max_bad_fraction": 1.0, "drop_duplicates": False})
        again = loader.load_trajectories(path, encoder, given)
        if [row.key for row in again.rows] != [row.key for row in rows]:
            yield f"written and read again: {len(rows)} rows become {len(again.rows)}, {again.rejects[:2]}"
        for one, other in zip(rows, again.rows, strict=False):
            for field in (
                "response_mask",
                "score",
                "group",
                "finish_reason",
                "token_level_scores",
            ):
                a, b = getattr(one, field), getattr(other, field)
                if not (a is b is None or (a is not None and b is not None and np.array_equal(a, b))):
                    yield f"written and read again: {field} of {one.where} was {a!r}, is {b!r}"

    def _scored(self, case: Case, rows: list[Any], encoder: Encoder) -> Iterator[str]:
        """The score stage writes each row with the user's own columns."""
        path = self.folder / "scored.parquet"
        score.write_scored([str(case.path)], path, rows, token_marks.noted(encoder))
        table = pq.read_table(path)
        if table.num_rows != len(rows):
            yield f"scored and written: {len(rows)} rows become {table.num_rows}"
        own = {"note", "created"} & set(columns_of(sources(case.path)[0]))
        if lost := own - set(table.column_names) - _always_null(case.path):
            yield f"scored and written: {sorted(lost)} are gone"


def _always_null(path: Path) -> set[str]:
    rows = [row for _, row in read_rows(path, bad=lambda where, reason: None)]
    return {name for row in rows for name in row if all(each.get(name) is None for each in rows)}


def _amiss(
    loaded: loader.Loaded[Any], case: Case, entry: Entry, data: Data, encoder: Encoder
) -> Iterator[str]:
    """What a result may not be."""
    kept, rejected = len(loaded.rows), len(loaded.rejects)
    if kept + rejected != loaded.total:
        yield f"{kept} rows and {rejected} rejects are not the {loaded.total} of the total"
    fits = {case.rows, entry.rows_of_one * (case.rows or 0)}  # a file without pairs has a row in each
    if case.rows is not None and loaded.total not in fits:
        yield f"the file has {case.rows} rows, the loader found {loaded.total}"
    for reject in loaded.rejects:
        said = f"{reject.where}: {reject.kind}: {reject.reason}"
        if not (reject.reason and reject.kind and case.path.name in reject.where):
            yield f"a reject without a place or a reason: {reject}"
        if not said.isprintable() or len(said) > 1000:
            yield f"a reject that is not a line: {said[:300]!r} ({len(said)} characters)"
        json.dumps(said).encode()
    for row in loaded.rows:
        yield from _amiss_row(row, data, encoder)
    for note in loaded.notes:
        if not note.isprintable():
            yield f"a note that is not a line: {note!r}"


def _amiss_row(row: Any, data: Data, encoder: Encoder) -> Iterator[str]:
    """What a row that training reads may not be."""
    sides = [getattr(row, name, None) for name in ("response_ids", "chosen_ids", "rejected_ids")]
    for ids, most in [
        (row.prompt_ids, data.max_prompt_length),
        *((side, data.max_response_length) for side in sides),
    ]:
        if ids is not None and not (
            ids.dtype == np.int64
            and 0 < len(ids) <= most
            and 0 <= ids.min() <= ids.max() < encoder.vocab_size
        ):
            yield f"{row.where}: ids {ids[:9]} ({len(ids)})"
    mask = getattr(row, "response_mask", None)
    if mask is not None and not (
        mask.dtype == np.bool_ and len(mask) == len(row.response_ids) and mask.any()
    ):
        yield f"{row.where}: mask {mask}"
    for name in ("behavior_log_probs", "token_level_scores"):
        values = getattr(row, name, None)
        if values is not None and not (len(values) == len(mask) and np.isfinite(values).all()):
            yield f"{row.where}: {name} {values}"
    for name in ("score", "temperature", "baseline_score", "margin"):
        value = getattr(row, name, None)
        if value is not None and not np.isfinite(np.float32(value)):
            yield f"{row.where}: {name} {value}"


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def work(seed: int, numbers: range, folder: Path, to: Connection) -> None:
    """A process: says which file it is at, then what it found."""
    signal.signal(signal.SIGALRM, _stop)
    fuzzer = Fuzzer(seed, folder)
    for number in numbers:
        to.send(number)
        to.send(fuzzer.findings(number))
    to.send(None)


def run(seed: int, files: int, workers: int, folder: Path) -> tuple[list[str], Counter[str]]:
    """All files, in processes; one that dies is a finding, and another goes on behind the file."""
    context = multiprocessing.get_context("spawn")
    found, ends, at = list[str](), Counter[str](), dict[Connection, int]()
    open_: dict[Connection, tuple[Any, int]] = {}

    def start(first: int) -> None:
        own, other = context.Pipe(duplex=False)
        place = folder / f"{first}"
        place.mkdir()
        process = context.Process(target=work, args=(seed, range(first, files, workers), place, other))
        process.start()
        other.close()
        open_[own], at[own] = (process, first), first

    for first in range(min(workers, files)):
        start(first)
    while open_:
        for own in wait(list(open_)):
            assert isinstance(own, Connection)
            try:
                said = own.recv()
            except EOFError:
                process, _ = open_.pop(own)
                process.join()
                found.append(f"seed {seed} file {at[own]}: the process died with {process.exitcode}")
                start(at[own] + workers)
                continue
            if said is None:
                open_.pop(own)[0].join()
            elif isinstance(said, int):
                at[own] = said
            else:
                found += said[0]
                ends += said[1]
    return found, ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="rein-fuzz-"))
    found, ends = run(given.seed, given.files, given.workers, folder)
    for said in found:
        print(said)
    print(", ".join(f"{count} {end}" for end, count in ends.most_common()))
    print(f"{given.files} files, {time.monotonic() - began:.0f} s, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
