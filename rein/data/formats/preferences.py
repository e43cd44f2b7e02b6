"""Prompt, chosen and rejected in any of the peers' layouts in, one pair with the prompt apart out.

The prompt is a column of its own, the turns that both conversations begin with, or the text that both answers
begin with. Knows no tool's column names but chosen and rejected.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from rein.data import schemas as s
from rein.data.formats.chat import ASSISTANT, answer_text, text_or_turns, turns
from rein.data.formats.layout import Source
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.types import Message

Side = list[Message] | str

DIALOGUE: Final = "texts with Human: and Assistant: marks became messages"
CUT: Final = "the prompt is the text that both answers begin with, up to its last whole word"
_MARK: Final = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def read_pair(source: Source, prompt: Side | None, chosen: Any, rejected: Any) -> Row:
    """A preferences row; raises BadRow where the two sides do not fit together."""
    sides: list[Side] = []
    for name, value in ((s.CHOSEN, chosen), (s.REJECTED, rejected)):
        if value is None or value == "" or value == []:
            raise BadRow("empty answer", f"{name} is missing")
        side = text_or_turns(value, name, source)
        sides.append(_dialogue(side, source) if isinstance(side, str) and not prompt else side)
    one, other = sides
    if isinstance(one, str) != isinstance(other, str):
        raise BadRow("wrong type", "one of chosen and rejected is text, the other is messages")
    if isinstance(one, str) and isinstance(other, str):
        if prompt is None:
            prompt, one, other = _shared_text(one, other, source)
    elif isinstance(one, list) and isinstance(other, list):
        prompt, one, other = _conversations(prompt, one, other)
    return {s.PROMPT: prompt, s.CHOSEN: _simple(one), s.REJECTED: _simple(other)}


def read_ranked(source: Source, prompt_names: Sequence[str], to: str = s.PROMPT) -> Row:
    """The usual columns: a prompt under one of these names, or none, beside chosen and rejected."""
    value = source.take(to, *prompt_names) if prompt_names else None
    prompt = None if value is None else text_or_turns(value, "prompt", source)
    row = read_pair(source, prompt, source.take(s.CHOSEN, s.CHOSEN), source.take(s.REJECTED, s.REJECTED))
    margin = source.take(s.MARGIN, s.MARGIN)
    return row if margin is None else {**row, s.MARGIN: margin}


def _conversations(
    prompt: Side | None, one: list[Message], other: list[Message]
) -> tuple[Side, list[Message], list[Message]]:
    whole = [side[0]["role"] != ASSISTANT for side in (one, other)]
    if whole == [False, False] and prompt is not None:
        return prompt, one, other
    if whole[0] != whole[1]:
        raise BadRow("wrong type", "one of chosen and rejected begins with its prompt, the other does not")
    alike = list(takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))
    size = min(len(alike), len(one) - 1, len(other) - 1)
    if one == other:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same")
    shared = one[:size]
    if not shared or one[size]["role"] != ASSISTANT or other[size]["role"] != ASSISTANT:
        raise BadRow("no prompt", "chosen and rejected share no prompt that an answer follows")
    return shared, one[size:], other[size:]


def _shared_text(one: str, other: str, source: Source) -> tuple[str, str, str]:
    """The longest common beginning that ends between words."""
    if one == other:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same")
    size = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False)))
    shared = one[:size]
    inside = any(len(text) > len(shared) and not text[len(shared)].isspace() for text in (one, other))
    if inside and not shared[-1:].isspace():
        shared = shared[: max((i + 1 for i, sign in enumerate(shared) if sign.isspace()), default=0)]
    prompt = shared.rstrip()
    if not prompt:
        raise BadRow("no prompt", "chosen and rejected do not begin alike, and there is no prompt column")
    source.note(CUT)
    return prompt, one[len(prompt) :], other[len(prompt) :]


def _dialogue(text: str, source: Source) -> Side:
    """A transcript with Human: and Assistant: marks as messages; any other text as it is."""
    marks = list(_MARK.finditer(text))
    if not marks or marks[0].start() != 0 or marks[0][1] != "Human" or len(marks) < 2:
        return text
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    source.note(DIALOGUE)
    return turns(
        [
            {"role": mark[1].lower(), "content": text[mark.end() : end].strip()}
            for mark, end in zip(marks, ends, strict=True)
        ],
        "transcript",
        source,
    )


def _simple(side: Side) -> Side:
    """One plain assistant turn as its text."""
    return answer_text(side[0]) if isinstance(side, list) and len(side) == 1 else side
