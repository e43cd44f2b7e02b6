"""Files, limits and perhaps a tokenizer in, facts out: the whole audit in one function."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from rein.config.recipe import Data
from rein.data import cells
from rein.data import schemas as s
from rein.data.audit.hashing import Keys
from rein.data.audit.overlap import Overlap, overlap_with
from rein.data.audit.reading import Way, read
from rein.data.audit.slow import prompt_keys
from rein.data.audit.stand_in import stand_in_encoder
from rein.data.audit.tally import Tally
from rein.data.audit.texts import tokens_of
from rein.data.files import Files, Source, sources
from rein.data.parquet import columns_of, no_rows, source_rows
from rein.data.rejects import Reject
from rein.data.rows_prompts import Reading
from rein.data.tokenize import Encoder
from rein.errors import DataError

FACTS: Final = {
    "version": "of this layout",
    "kind": "prompts, trajectories, preferences or sft",
    "files": "name, rows, usable, bytes, columns and ignored (columns that nobody reads) of each file",
    "tokenizer": "given or not: else text is measured in characters and has no limits",
    "limits": "max_prompt_length, max_response_length, max_bad_fraction the rows were judged by",
    "rows": "total, usable, rejected, rejected_share, by_reason, first (named rejects), noticed",
    "lengths": "prompt, response (or chosen, rejected): unit, distribution, other_unit (rows not in it)",
    "endings": "stop, length, other, unknown; truncated_share, longest, at_longest, last_id; "
    "missing_end (rows with ids that end in no end token; null without a tokenizer)",
    "duplicates": "copies of whole rows; distinct_prompts; near (on a sample): compared, alike, share",
    "overlap": "against, against_prompts, shared_prompts, shared_share, shared_rows, examples; or null",
    "groups": "groups, answers (per prompt), single, several, without_spread and its _rows, _share",
    "score": "missing, distribution, against_length {n, r, low, high}, by_length, length_unit; or null",
    "text": "sides: rows, special (token -> rows), with_special, replacement_marks, blank; repetition",
    "behavior": "rows, tokens, mean, zero_share, above_zero, lowest, at_lowest, below, row_mean, "
    "token_histogram; or null where no row has log-probs",
    "names": "column -> distinct, rows, most (name -> rows): behavior_policy, policy_version, ...",
    "pairs": "identical, empty, chosen_longer_share, chosen_shorter_share, difference; or null",
    "model": "what a model says of the rows; null here",
    "verdict": "what to do with the data; null here",
}
VERSION = 1
Progress = Callable[[int], None]  # told how many rows have passed


def audit(
    files: Files,
    data: Data,
    *,
    encoder: Encoder | None = None,
    own_tokens: Iterable[str] = (),  # the tokenizer's special tokens
    against: Files | None = None,  # evaluation prompts
    sft: tuple[str, str] | None = None,  # read as demonstrations under these keys
    passed: Progress = lambda rows: None,
) -> tuple[dict[str, Any], list[Reject]]:
    """The facts, and the first rejects (tally.KEPT of them).

    Raises DataError for files that are of no kind, of several kinds, or without a row.
    """
    found = sources(files)
    kind: s.Kind = "sft" if sft else _kind(found)
    reading = Reading(encoder or stand_in_encoder(), data)
    tally = Tally(
        kind,
        tokens_of(own_tokens),
        frozenset() if encoder is None else encoder.stop_ids,
        None if against is None else _overlap(against, reading, sft[0] if sft else s.PROMPT),
    )
    told = [_file(source, tally, way_of(source, kind, reading, sft), passed) for source in found]
    if not tally.total:
        raise no_rows(found)
    tally.noticed.update(reading.noticed)
    facts: dict[str, Any] = {
        "version": VERSION,
        "kind": kind,
        "files": told,
        "tokenizer": encoder is not None,
        "limits": {
            name: getattr(data, name)
            for name in ("max_prompt_length", "max_response_length", "max_bad_fraction")
        },
    }
    return facts | tally.facts() | {"model": None, "verdict": None}, tally.rejects


def way_of(source: Source, kind: s.Kind, reading: Reading, sft: tuple[str, str] | None = None) -> Way:
    """How a file is read; trajectories that have a score column are held to have scores, as in training."""
    scored = kind == "trajectories" and bool({s.SCORE, s.TOKEN_LEVEL_SCORES} & set(columns_of(source)))
    return Way(kind, reading, scored, *(sft or (s.PROMPT, s.RESPONSE)))


def _file(source: Source, tally: Tally, way: Way, passed: Progress) -> dict[str, Any]:
    before, usable = tally.total, 0
    for block, rejects in read(source, way):
        done = tally.total
        tally.reject(rejects)
        if block is not None:
            usable += block.rows
            tally.add(block)
        passed(tally.total - done)
    columns, (wanted, *_) = columns_of(source), way.chosen(source)
    return {
        "name": source.name,
        "rows": tally.total - before,
        "usable": usable,
        "bytes": source.path.stat().st_size,
        "columns": columns,
        "ignored": [name for name in columns if name not in wanted],
    }


def _kind(found: list[Source]) -> s.Kind:
    kinds: dict[s.Kind, str] = {}
    for source in found:
        columns = columns_of(source)
        try:
            kinds.setdefault(s.kind_of(columns), source.name)
        except DataError as error:
            raise DataError(f"{source.name}: {error}, or map the columns with `rein convert`") from error
    if len(kinds) > 1:
        said = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
        raise DataError(f"{said}: files of several kinds; audit one kind at a time")
    return next(iter(kinds))


def _overlap(files: Files, reading: Reading, prompt_key: str) -> Overlap:
    """The prompts of evaluation files; under the demonstrations' key where they have no prompt column."""
    found, keys = sources(files), list[tuple[Keys, Keys]]()
    for source in found:
        columns, quiet = columns_of(source), Reading(reading.encoder, reading.data)
        if not {s.PROMPT, s.PROMPT_IDS} & set(columns):
            root = prompt_key if prompt_key in columns else prompt_key.partition(".")[0]
            if root not in columns:
                error = s.missing(source.name, s.PROMPT, columns)
                raise DataError(f"{error}, or map the columns with `rein convert`")
            rows = (row for _, row in source_rows(source, {root}, lambda where, why: None))
            text = prompt_keys([cells.at(row, prompt_key) for row in rows])
            keys.append((text, np.zeros_like(text)))
            continue
        for block, _ in read(source, Way("prompts", quiet)):
            if block is not None:
                keys.append((block.prompt.text_key, block.prompt.ids_key))
    return overlap_with([source.name for source in found], keys)
