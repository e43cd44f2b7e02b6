"""Rows that the loader's own readers accepted, one at a time in; the same Block as the vectorised pass out.

Keys are the same as fast.py's: a prompt of text is one user turn, ids are hashed apart from text.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rein.data import cells
from rein.data import schemas as s
from rein.data.audit.block import LENGTH, OTHER, STOP, UNKNOWN, Block, LogProbs, Side
from rein.data.audit.columns import sums
from rein.data.audit.hashing import NONE, Keys, Offsets, list_keys, pair_keys
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.types import Demonstration, Ids, Message, PreferencePair, Prompt, Trajectory

Item = Prompt | Trajectory | PreferencePair | Demonstration
Words = list[Message] | str | None

LABELS = (s.BEHAVIOR_POLICY, s.DATA_SOURCE, s.FINISH_REASON)
NUMBERS = (s.TEMPERATURE, s.POLICY_VERSION)


@dataclass(frozen=True, slots=True)
class Used:
    """A usable row: what was stored and what the loader made of it."""

    where: str
    row: Row
    item: Item


def slow_block(
    used: Sequence[Used], *, tokenizer: bool, prompt_key: str = s.PROMPT, response_key: str = s.RESPONSE
) -> Block:
    """The rows' Block. Without a tokenizer, ids that were not stored are no ids."""
    items = [each.item for each in used]
    first = items[0] if items else None
    words = [_words(each, prompt_key, response_key) for each in used]
    stored = [tokenizer or each.row.get(s.PROMPT_IDS) is not None for each in used]
    prompt = _side([w[0] for w in words], [i.prompt_ids for i in items], stored, prompt=True)
    response = rejected = None
    if isinstance(first, PreferencePair):
        pairs = [i for i in items if isinstance(i, PreferencePair)]
        known = [tokenizer] * len(used)
        response = _side([w[1] for w in words], [i.chosen_ids for i in pairs], known)
        rejected = _side([w[2] for w in words], [i.rejected_ids for i in pairs], known)
    elif first is not None and not isinstance(first, Prompt):
        answered = [i for i in items if isinstance(i, Trajectory | Demonstration)]
        stored = [tokenizer or each.row.get(s.RESPONSE_IDS) is not None for each in used]
        response = _side([w[1] for w in words], [i.response_ids for i in answered], stored)
    rows = [i for i in items if isinstance(i, Trajectory)]
    groups = [cells.label(each.row.get(s.GROUP), s.GROUP) if rows else "" for each in used]
    return Block(
        where=lambda i: used[i].where,
        prompt=prompt,
        group=np.where([bool(g) for g in groups], _text_keys(groups), NONE),
        response=response,
        rejected=rejected,
        score=np.array([np.nan if t.score is None else t.score for t in rows]) if rows else None,
        finish=np.array([_finish(t.finish_reason) for t in rows], np.int8) if rows else None,
        log_probs=_log_probs(rows),
        names=_names(used),
    )


def prompt_keys(values: Sequence[Any]) -> Keys:
    """The keys of prompts as they are stored; of what is no prompt, none."""
    words = [found for value in values if (found := _read(value, s.PROMPT)) is not None]
    return _prompt_keys(words)


def _words(used: Used, prompt_key: str, response_key: str) -> tuple[Words, Words, Words]:
    """Prompt and answers as they were stored; None for what was stored as ids only."""
    row, item = used.row, used.item
    if isinstance(item, PreferencePair):
        return item.messages, item.chosen, item.rejected
    if (
        isinstance(item, Demonstration)
        and row.get(response_key.partition(".")[0]) is None
        and s.MESSAGES in row
    ):
        turns = _read(row.get(s.MESSAGES), s.MESSAGES)
        if isinstance(turns, list):
            last = max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
            return turns[:last], str(turns[last]["content"]), None
        return None, None, None
    demonstration = isinstance(item, Demonstration)
    prompt = cells.at(row, prompt_key) if demonstration else row.get(s.PROMPT)
    response = cells.at(row, response_key) if demonstration else row.get(s.RESPONSE)
    return _read(prompt, s.PROMPT), _read(response, s.RESPONSE), None


def _read(value: Any, name: str) -> Words:
    """The messages or text; None where there is none, and beside stored ids where it is neither."""
    if value is not None:
        with suppress(BadRow):
            return cells.messages_or_text(value, name)
    return None


def _side(
    words: Sequence[Words], ids: Sequence[Ids], stored: Sequence[bool], *, prompt: bool = False
) -> Side:
    """A side; an answer's ids hide its text, as they do for the loader."""
    has_ids = np.array(stored, dtype=np.bool_)
    kept = [row if known else row[:0] for row, known in zip(ids, stored, strict=True)]
    values, offsets = _joined(kept)
    strings = [_strings(each) for each in words]
    has_text = np.array([each is not None for each in words], dtype=np.bool_)
    text_key = _prompt_keys(words) if prompt else _text_keys(["\n".join(each) for each in strings])
    lengths, characters = np.diff(offsets), np.array([sum(map(len, each)) for each in strings], np.int64)
    hidden = has_ids & ~np.bool_(prompt)
    return Side(
        text_key=np.where(has_text & ~hidden, text_key, NONE),
        ids_key=np.where(has_ids, list_keys(values, offsets), NONE),
        length=np.where(has_ids, lengths, characters),
        in_tokens=has_ids,
        last=np.array([int(row[-1]) if len(row) else -1 for row in kept], np.int64),
        content=lambda i: kept[i] if stored[i] and not (prompt and has_text[i]) else "\n".join(strings[i]),
        texts=pa.array([text for each in strings for text in each], pa.large_string()),
        text_rows=np.repeat(np.arange(len(strings)), [len(each) for each in strings]),
    )


def _strings(words: Words) -> list[str]:
    if words is None:
        return []
    return [words] if isinstance(words, str) else [str(turn["content"]) for turn in words]


def _prompt_keys(words: Sequence[Words]) -> Keys:
    turns = [w if isinstance(w, list) else [{"role": "user", "content": w or ""}] for w in words]
    flat = [turn for each in turns for turn in each]
    keys = pair_keys(
        _text_keys([str(turn["role"]) for turn in flat]), _text_keys([str(turn["content"]) for turn in flat])
    )
    return list_keys(keys, _ends([len(each) for each in turns]))


def _text_keys(strings: Sequence[str]) -> Keys:
    encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
    return list_keys(np.frombuffer(b"".join(encoded), np.uint8), _ends([len(text) for text in encoded]))


def _joined(rows: Sequence[Ids]) -> tuple[Ids, Offsets]:
    values = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return values, _ends([len(row) for row in rows])


def _ends(lengths: Sequence[int]) -> Offsets:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))))


def _finish(reason: str) -> int:
    return STOP if reason == "stop" else LENGTH if reason == "length" else OTHER if reason else UNKNOWN


def _log_probs(rows: Sequence[Trajectory]) -> LogProbs | None:
    counted = [r.behavior_log_probs[r.response_mask] for r in rows if r.behavior_log_probs is not None]
    if not counted:
        return None
    lengths = np.array([len(each) for each in counted])
    values = np.concatenate(counted)
    return LogProbs(values, sums(values, _ends(lengths.tolist())) / lengths)


def _names(used: Sequence[Used]) -> dict[str, Counter[str]]:
    found = {name: Counter[str]() for name in (*LABELS, *NUMBERS)}
    for each in used:
        if isinstance(each.item, Demonstration | PreferencePair):
            continue
        for name in LABELS:
            with suppress(BadRow):  # beside a prompt, nobody reads these
                found[name][cells.label(each.row.get(name), name)] += 1
        for name in NUMBERS:
            with suppress(BadRow):
                value = cells.number(each.row.get(name), name)
                found[name]["" if value is None else f"{value:.10g}"] += 1
    for counter in found.values():
        counter.pop("", None)
    return {name: counter for name, counter in found.items() if counter}
