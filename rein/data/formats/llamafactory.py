"""LLaMA-Factory's rows: alpaca and ShareGPT, each for fine-tuning, ranking (pairs) and KTO (labels).

Its data/README names the columns; a turn's words may be from/value or role/content.
"""

from typing import Any, Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.chat import text_only, turns, with_system
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    absent,
    first_of,
    has_any,
    is_text,
    is_turn,
    is_turns,
    scored,
)
from rein.data.formats.preferences import read_pair
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.types import Message

TURNS: Final = ("conversations", "conversation", "messages")
LABELS: Final = ("kto_tag", "label")
VERDICTS: Final = ("is_correct", "correct", "score", "reward")  # then it is no demonstration
SYSTEM: Final = ("system", "system_prompt")


def _ranked(row: Row) -> bool:
    return all(
        is_text(row.get(name)) or is_turn(row.get(name)) or is_turns(row.get(name))
        for name in (s.CHOSEN, s.REJECTED)
    )


def _ranked_turns(row: Row) -> bool:
    return all(is_turns(row.get(name)) for name in ("chosen_messages", "rejected_messages"))


def _instructed(row: Row) -> bool:
    return is_text(row.get("instruction"))


def _answered(row: Row) -> bool:
    return _instructed(row) and is_text(first_of(row, "output", "response"))


def _talked(row: Row) -> bool:
    return is_turns(first_of(row, *TURNS))


def _label(row: Row) -> bool:
    return isinstance(first_of(row, *LABELS), bool | int)


def _instruction(source: Source) -> str | list[Message]:
    """Instruction and input as one turn, after the system text and earlier rounds."""
    text_only(source)
    parts = [cells.text(source.take(s.PROMPT, name) or "", name) for name in ("instruction", "input")]
    asked = "\n".join(part for part in parts if part)
    if not asked.strip():
        raise BadRow("no prompt", "instruction and input are empty")
    before: list[Message] = []
    history = source.take(s.PROMPT, "history") or []
    if not isinstance(history, list):
        raise BadRow("wrong type", "history is no list of pairs")
    for i, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow("wrong type", f"history[{i}] is no pair of prompt and response")
        question, answer = (cells.text(text, f"history[{i}]") for text in pair)
        before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages = with_system(source.take(s.PROMPT, *SYSTEM), [*before, {"role": "user", "content": asked}])
    return messages if len(messages) > 1 else asked


def _alpaca(source: Source) -> list[Row]:
    prompt = _instruction(source)
    response = source.take(s.RESPONSE, "output", "response")
    if absent(response) or not str(response).strip():
        raise BadRow("empty answer", "output is empty")
    if isinstance(prompt, list) and any(turn["role"] == "assistant" for turn in prompt):
        answer = {"role": "assistant", "content": cells.text(response, "output")}
        return [{s.MESSAGES: [*prompt, answer]}]
    return [{s.PROMPT: prompt, s.RESPONSE: cells.text(response, "output")}]


def _alpaca_ranked(source: Source) -> list[Row]:
    prompt = _instruction(source)
    chosen, rejected = (source.take(name, name) for name in (s.CHOSEN, s.REJECTED))
    return [read_pair(source, prompt, chosen, rejected)]


def _alpaca_labeled(source: Source) -> list[Row]:
    rows = _alpaca(source)
    return [{**row, s.SCORE: _score(source)} for row in rows]


def _score(source: Source) -> float:
    return scored(source.take(s.SCORE, *LABELS), "the label")


def _messages(source: Source, to: str) -> list[Message]:
    text_only(source)
    found = turns(source.take(to, *TURNS), "conversations", source)
    return with_system(source.take(to, *SYSTEM), found)


def _sharegpt(source: Source) -> list[Row]:
    return [{s.MESSAGES: _messages(source, s.MESSAGES)}]


def _sharegpt_ranked(source: Source) -> list[Row]:
    prompt = _messages(source, s.PROMPT)
    chosen, rejected = (_side(source.take(name, name)) for name in (s.CHOSEN, s.REJECTED))
    return [read_pair(source, prompt, chosen, rejected)]


def _two_conversations(source: Source) -> list[Row]:
    text_only(source)
    chosen, rejected = (source.take(name, f"{name}_messages") for name in (s.CHOSEN, s.REJECTED))
    return [read_pair(source, None, chosen, rejected)]


def _sharegpt_labeled(source: Source) -> list[Row]:
    return [{**row, s.SCORE: _score(source)} for row in _sharegpt(source)]


def _side(value: Any) -> Any:
    """An answer as messages, whatever it came as."""
    return [{"role": "assistant", "content": value}] if isinstance(value, str) and value else value


LLAMAFACTORY: Final = Format(
    "LLaMA-Factory: alpaca and ShareGPT, for fine-tuning, ranking and KTO",
    (
        Layout(
            "ShareGPT ranking",
            "preferences",
            "conversations, chosen, rejected",
            lambda row: _talked(row) and _ranked(row) and not has_any(row, s.PROMPT),
            _sharegpt_ranked,
        ),
        Layout(
            "two conversations",
            "preferences",
            "chosen_messages, rejected_messages",
            _ranked_turns,
            _two_conversations,
        ),
        Layout(
            "alpaca ranking",
            "preferences",
            "instruction, input, chosen, rejected",
            lambda row: _instructed(row) and _ranked(row),
            _alpaca_ranked,
        ),
        Layout(
            "ShareGPT with labels",
            "trajectories",
            "conversations or messages, label or kto_tag",
            lambda row: _talked(row) and _label(row),
            _sharegpt_labeled,
        ),
        Layout(
            "alpaca with labels",
            "trajectories",
            "instruction, input, output, kto_tag",
            lambda row: _answered(row) and _label(row),
            _alpaca_labeled,
        ),
        Layout(
            "ShareGPT",
            "sft",
            "conversations or messages",
            lambda row: _talked(row) and not has_any(row, s.CHOSEN, s.REJECTED),
            _sharegpt,
        ),
        Layout(
            "alpaca",
            "sft",
            "instruction, input, output",
            lambda row: _answered(row) and not has_any(row, *VERDICTS),
            _alpaca,
        ),
    ),
)
