"""A row that a layout read in, rows of the kind that is written out, each checked as the loader would.

A prompt may be had of any kind, demonstrations and trajectories of whatever has an answer; pairs of scored
trajectories need their neighbors and are made by `pairs_of`. Knows no tool.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from rein.data import schemas as s
from rein.data.filters import LOG_PROB_TOLERANCE
from rein.data.formats.chat import ASSISTANT, answer_text
from rein.data.formats.layout import Ledger, absent, is_number
from rein.data.formats.log_probs import BEYOND, LEFT
from rein.data.formats.typed import typed
from rein.data.groups import best_against_worst
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.data.schemas import Kind

KINDS_OF: Final = {
    "prompts": s.PROMPTS,
    "trajectories": s.TRAJECTORIES,
    "preferences": s.PREFERENCES,
    "sft": s.SFT,
}
RANKED = "chosen is scored 1 and rejected 0, which says no more than which is better"
UNSCORED = "rows have no score: `rein score` gives them one"


def as_kind(row: Row, kind: Kind, ledger: Ledger) -> list[Row]:
    """The row as rows of this kind; raises BadRow where it holds no such thing."""
    found = [typed(made) for made in _MAKE[kind](row, ledger)]
    for made in found:
        _CHECK[kind](made)
    names = KINDS_OF[kind].names
    return [{name: made[name] for name in names if not _empty(made.get(name))} for made in found]


def prompt_name(row: Row) -> str:
    """What tells the row's prompt from others."""
    return json.dumps([row.get(s.PROMPT) or row.get(s.PROMPT_IDS), row.get(s.TOOLS)], sort_keys=True)


def pairs_of(answers: Iterable[Row]) -> Iterator[tuple[Row, int]]:
    """Better and worse answers to each prompt as pairs, each with how many of the answers it used.

    The rule is that of data/groups.py. A prompt's answers are gathered first.
    """
    gathered: dict[str, list[Row]] = {}
    for row in answers:
        gathered.setdefault(prompt_name(row), []).append(row)
    for group in gathered.values():
        for better, worse in best_against_worst([row[s.SCORE] for row in group]):
            one, other = group[better], group[worse]
            if one[s.RESPONSE] != other[s.RESPONSE]:
                kept = {name: one[name] for name in s.PREFERENCES.names if name in one}
                yield {**kept, s.CHOSEN: one[s.RESPONSE], s.REJECTED: other[s.RESPONSE]}, 2


def for_pairs(row: Row) -> Row:
    """A trajectory that can be ranked: text, a prompt and a score."""
    if row.get(s.SCORE) is None:
        raise BadRow("no score", "the row has no score, and pairs are made of better and worse answers")
    if row.get(s.RESPONSE) is None or row.get(s.PROMPT) is None:
        raise BadRow("no text", "the row holds ids without text, and pairs hold text")
    return row


def _prompts(row: Row, ledger: Ledger) -> list[Row]:
    if row.get(s.PROMPT) is None and row.get(s.MESSAGES):
        row = {**row, s.PROMPT: _split(row[s.MESSAGES])[0]}
    return [row]


def _trajectories(row: Row, ledger: Ledger) -> list[Row]:
    if s.CHOSEN in row and s.REJECTED in row:
        ledger.noticed[RANKED] += 1
        sides = ((row[s.CHOSEN], 1.0), (row[s.REJECTED], 0.0))
        return [{**row, s.RESPONSE: side, s.SCORE: score} for side, score in sides]
    if row.get(s.PROMPT) is None and row.get(s.MESSAGES):
        prompt, answer = _split(row[s.MESSAGES])
        row = {**row, s.PROMPT: prompt, s.RESPONSE: answer_text(answer)}
    if not _are_log_probs(row):
        ledger.noticed[f"{LEFT}{BEYOND}"] += 1
        row = {**row, s.BEHAVIOR_LOG_PROBS: None}
    ledger.noticed[UNSCORED] += row.get(s.SCORE) is None and row.get(s.TOKEN_LEVEL_SCORES) is None
    return [row]


def _are_log_probs(row: Row) -> bool:
    """Whether the loader takes them: where the mask counts a token, finite and at most 0."""
    found, mask = row.get(s.BEHAVIOR_LOG_PROBS), row.get(s.RESPONSE_MASK)
    if not isinstance(found, list):
        return True
    counts = mask if isinstance(mask, list) and len(mask) == len(found) else [True] * len(found)
    return all(
        is_number(value) and value <= LOG_PROB_TOLERANCE
        for value, counted in zip(found, counts, strict=True)
        if counted
    )


def _preferences(row: Row, ledger: Ledger) -> list[Row]:
    return [row]


def _sft(row: Row, ledger: Ledger) -> list[Row]:
    if s.CHOSEN in row:
        row = {**row, s.RESPONSE: row[s.CHOSEN]}
    response, prompt = row.get(s.RESPONSE), row.get(s.PROMPT)
    if isinstance(response, list) and len(response) == 1 and not response[0].get("tool_calls"):
        row = {**row, s.RESPONSE: response[0]["content"]}
    elif isinstance(response, list) and prompt is not None:
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = {**row, s.MESSAGES: [*before, *response], s.PROMPT: None, s.RESPONSE: None}
    return [row]


def _split(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What stands before the last answer, and that answer."""
    last = max((i for i, turn in enumerate(messages) if turn["role"] == ASSISTANT), default=0)
    if not last:
        raise BadRow("no assistant turn", "the messages hold no question that an answer follows")
    return messages[:last], messages[last]


def _check_prompt(row: Row) -> None:
    prompt = row.get(s.PROMPT)
    if _empty(prompt) and _empty(row.get(s.PROMPT_IDS)):
        raise BadRow("no prompt", "the prompt is missing")
    if isinstance(prompt, str) and not prompt.strip():
        raise BadRow("no prompt", "the prompt is empty")
    if isinstance(prompt, list) and not any(str(turn["content"]).strip() for turn in prompt):
        raise BadRow("no prompt", "the prompt's messages are empty")
    if isinstance(prompt, list) and prompt[-1]["role"] == ASSISTANT:
        raise BadRow("prompt ends in an answer", "the prompt's last message is an assistant turn")


def _check_prompts(row: Row) -> None:
    if _empty(row.get(s.PROMPT)):
        raise BadRow("no prompt", "the prompt is missing")
    _check_prompt(row)


def _check_answer(value: Any, name: str) -> None:
    if _empty(value):
        raise BadRow("empty answer", f"{name} is empty")
    if isinstance(value, list) and value[-1]["role"] != ASSISTANT:
        raise BadRow("answer ends in no answer", f"{name} ends in a {value[-1]['role']} turn")
    said = value[-1] if isinstance(value, list) else {"content": value}
    if not str(said["content"] or "").strip() and not said.get("tool_calls"):
        raise BadRow("empty answer", f"{name} is empty")


def _check_trajectories(row: Row) -> None:
    _check_prompt(row)
    ids, response = row.get(s.RESPONSE_IDS), row.get(s.RESPONSE)
    if not ids:
        _check_answer(response, s.RESPONSE)
    for name in (s.BEHAVIOR_LOG_PROBS, s.RESPONSE_MASK, s.TOKEN_LEVEL_SCORES):
        if row.get(name) is not None and len(row[name]) != len(ids or ()):
            raise BadRow("lengths differ", f"{len(ids or ())} response_ids but {len(row[name])} {name}")


def _check_preferences(row: Row) -> None:
    _check_prompts(row)
    if _empty(row.get(s.CHOSEN)) or _empty(row.get(s.REJECTED)):
        raise BadRow("no pair", "the row has no chosen and rejected")
    for name in (s.CHOSEN, s.REJECTED):
        _check_answer(row[name], name)
    if row[s.CHOSEN] == row[s.REJECTED]:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same")


def _check_sft(row: Row) -> None:
    messages = row.get(s.MESSAGES)
    if messages:
        answers = [turn for turn in messages if turn["role"] == ASSISTANT]
        if not answers:
            raise BadRow("no assistant turn", "the messages hold no assistant turn to learn")
        if messages[-1]["role"] != ASSISTANT:
            raise BadRow("ends in no answer", f"the last message is a {messages[-1]['role']} turn")
        _check_answer(answers[-1:], s.MESSAGES)
        return
    _check_prompts(row)
    if _empty(row.get(s.RESPONSE)):
        raise BadRow("no response", "the row holds no answer to learn")
    _check_answer(row[s.RESPONSE], s.RESPONSE)


def _empty(value: Any) -> bool:
    return absent(value) or (isinstance(value, str | dict | Sequence) and not value)


_MAKE: Final = {"prompts": _prompts, "trajectories": _trajectories, "preferences": _preferences, "sft": _sft}
_CHECK: Final = {
    "prompts": _check_prompts,
    "trajectories": _check_trajectories,
    "preferences": _check_preferences,
    "sft": _check_sft,
}
