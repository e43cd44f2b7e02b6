"""OpenRLHF's rows: pairs under prompt or `context_messages`, input and output with their rewards, prompts.

OpenRLHF names columns by options (`--input_key`, `--output_key`, `--label_key`, ...); the names below are
those of its scripts and published data sets.
"""

from typing import Any, Final

from rein.data import schemas as s
from rein.data.formats.chat import text_only, text_or_turns, with_system
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    absent,
    bare,
    first_of,
    has_any,
    is_number,
    is_text,
    is_turn,
    is_turns,
    scored,
    truth,
)
from rein.data.formats.preferences import read_ranked
from rein.data.parquet import Row
from rein.data.rejects import BadRow

PROMPTS: Final = ("context_messages", "prompt", "input", "question", "instruction", "query")
ANSWERS: Final = ("output", "response")
SYSTEM: Final = ("system", "system_prompt")
REWARDS: Final = ("reward", "score")
LABELS: Final = ("label", "answer", "ground_truth")


def _text(value: Any) -> bool:
    return is_text(value) or is_turns(value) or is_turn(value)


def _asked(row: Row) -> bool:
    return _text(first_of(row, *PROMPTS))


def _sided(row: Row) -> bool:
    return _text(row.get(s.CHOSEN)) and _text(row.get(s.REJECTED))


def _answered(row: Row) -> bool:
    return _asked(row) and _text(first_of(row, *ANSWERS))


def _preference(source: Source) -> list[Row]:
    text_only(source)
    return [read_ranked(source, PROMPTS)]


def _prompt_apart(source: Source) -> list[Row]:
    if source.peek(*PROMPTS) is None:
        raise BadRow("no prompt", f"none of {', '.join(PROMPTS)} holds a prompt")
    return _preference(source)


def _prompt(source: Source) -> Row:
    text_only(source)
    value = source.take(s.PROMPT, *PROMPTS)
    if absent(value):
        raise BadRow("no prompt", f"none of {', '.join(PROMPTS)} holds a prompt")
    prompt, system = text_or_turns(value, "the prompt", source), source.take(s.PROMPT, *SYSTEM)
    if system is None or not str(system).strip():
        return {s.PROMPT: prompt}
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {s.PROMPT: with_system(system, asked)}


def _answer(source: Source) -> list[Row]:
    row = _prompt(source)
    value = source.take(s.RESPONSE, *ANSWERS)
    if absent(value):
        raise BadRow("no response", f"none of {', '.join(ANSWERS)} holds an answer")
    row[s.RESPONSE] = text_or_turns(value, "the answer", source)
    return [row]


def _rewarded(source: Source) -> list[Row]:
    (row,) = _answer(source)
    name = next((name for name in (*REWARDS, "label") if source.peek(name) is not None), REWARDS[0])
    return [{**row, s.SCORE: scored(source.take(s.SCORE, name), name)}]


def _labeled_prompt(source: Source) -> list[Row]:
    prompt, label = _prompt(source), source.take("reward_model.ground_truth", *LABELS)
    return [{**prompt, s.REWARD_MODEL: truth(label), s.RESPONSE: label if is_text(label) else None}]


OPENRLHF: Final = Format(
    "OpenRLHF: pairs, input and output with reward or label, prompts (context_messages)",
    (
        Layout(
            "preferences",
            "preferences",
            "prompt or context_messages, chosen, rejected",
            lambda row: _sided(row) and _asked(row),
            _prompt_apart,
        ),
        Layout(
            "preferences, prompt inside",
            "preferences",
            "chosen, rejected",
            lambda row: _sided(row) and not has_any(row, "conversations"),
            _preference,
        ),
        Layout(
            "rewarded answers",
            "trajectories",
            "input, output, reward",
            lambda row: (
                _answered(row) and (is_number(first_of(row, *REWARDS)) or is_number(row.get("label")))
            ),
            _rewarded,
        ),
        Layout("demonstrations", "sft", "input or question, output or response", _answered, _answer),
        Layout(
            "prompts",
            "prompts",
            "context_messages or input",
            lambda row: _asked(row) and bare(row),
            _labeled_prompt,
        ),
    ),
)
