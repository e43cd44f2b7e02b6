"""TRL's dataset types, standard (text) and conversational (messages): docs/dataset_formats of TRL."""

from typing import Final

from rein.data import schemas as s
from rein.data.formats.chat import text_only, text_or_turns, turns
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
)
from rein.data.formats.preferences import read_ranked
from rein.data.parquet import Row
from rein.data.rejects import BadRow

SCORES: Final = ("score", "reward", "rewards")
SCALED = (
    "the margin is score_chosen - score_rejected, in their scale: the reward model learns it as it stands"
)
SIDE_SCORES: Final = ("score_chosen", "score_rejected")  # of pairs: their difference is the margin
ELSEWHERE: Final = ("conversations", "instruction", "question", "query", "input", "context_messages")


def _sided(row: Row) -> bool:
    return all(
        is_text(row.get(name)) or is_turns(row.get(name)) or is_turn(row.get(name))
        for name in (s.CHOSEN, s.REJECTED)
    )


def _has_prompt(row: Row) -> bool:
    return is_text(row.get(s.PROMPT)) or is_turns(row.get(s.PROMPT))


def _completed(row: Row) -> bool:
    return _has_prompt(row) and (
        is_text(row.get("completion")) or is_turns(row.get("completion")) or is_turn(row.get("completion"))
    )


def _preference(source: Source) -> list[Row]:
    text_only(source)
    if source.peek(s.MESSAGES) == source.row.get(s.CHOSEN):
        source.leave("the same as chosen", s.MESSAGES)
    row = read_ranked(source, (s.PROMPT,))
    chosen, rejected = (source.peek(name) for name in SIDE_SCORES)
    if s.MARGIN not in source.row and is_number(chosen) and is_number(rejected):
        row[s.MARGIN] = chosen - rejected
        source.note(SCALED)
        for name in SIDE_SCORES:
            source.take(s.MARGIN, name)
    return [row]


def _prompt_apart(source: Source) -> list[Row]:
    if source.peek(s.PROMPT) is None:
        raise BadRow("no prompt", "prompt is missing")
    return _preference(source)


def _completion(source: Source) -> Row:
    text_only(source)
    value = source.take(s.RESPONSE, "completion")
    if absent(value):
        raise BadRow("no response", "completion is missing")
    return {
        s.PROMPT: text_or_turns(source.take(s.PROMPT, s.PROMPT), s.PROMPT, source),
        s.RESPONSE: text_or_turns(value, "completion", source),
    }


def _labeled(source: Source) -> list[Row]:
    row = _completion(source)
    return [{**row, s.SCORE: scored(source.take(s.SCORE, "label"), "label")}]


def _scored(source: Source) -> list[Row]:
    row = _completion(source)
    name = next(name for name in SCORES if not absent(source.peek(name)) or name == SCORES[-1])
    if (step := source.peek("step")) is not None and isinstance(step, int):
        row[s.POLICY_VERSION] = source.take(s.POLICY_VERSION, "step")
    return [{**row, s.SCORE: scored(source.take(s.SCORE, name), name)}]


def _conversation(source: Source) -> list[Row]:
    text_only(source)
    return [{s.MESSAGES: turns(source.take(s.MESSAGES, s.MESSAGES), s.MESSAGES, source)}]


def _prompt_only(source: Source) -> list[Row]:
    text_only(source)
    prompt = text_or_turns(source.take(s.PROMPT, s.PROMPT), s.PROMPT, source)
    return [{s.PROMPT: prompt}]


def _never(source: Source) -> list[Row]:
    raise BadRow("other layout", "the layout is refused")


def _is_process(row: Row) -> bool:
    return (
        _has_prompt(row) and isinstance(row.get("completions"), list) and isinstance(row.get("labels"), list)
    )


TRL: Final = Format(
    "TRL: preference (prompt apart or inside), unpaired, prompt-completion, prompt-only, messages",
    (
        Layout(
            "preferences, prompt apart",
            "preferences",
            "prompt, chosen, rejected",
            lambda row: _sided(row) and _has_prompt(row),
            _prompt_apart,
        ),
        Layout(
            "preferences, prompt inside",
            "preferences",
            "chosen, rejected",
            lambda row: _sided(row) and not has_any(row, s.PROMPT, *ELSEWHERE),
            _preference,
        ),
        Layout(
            "unpaired preferences",
            "trajectories",
            "prompt, completion, label",
            lambda row: _completed(row) and isinstance(row.get("label"), bool | int | float),
            _labeled,
        ),
        Layout(
            "scored completions",
            "trajectories",
            "prompt, completion, score or reward",
            lambda row: _completed(row) and is_number(first_of(row, *SCORES)),
            _scored,
        ),
        Layout(
            "prompt and completion",
            "sft",
            "prompt, completion",
            _completed,
            lambda source: [_completion(source)],
        ),
        Layout(
            "conversations",
            "sft",
            "messages",
            lambda row: is_turns(row.get(s.MESSAGES)) and bare(row),
            _conversation,
        ),
        Layout(
            "stepwise supervision",
            "trajectories",
            "prompt, completions, labels",
            _is_process,
            _never,
            refused="labels of single steps are no score of the answer, and Rein has no process rewards",
        ),
        Layout("prompts", "prompts", "prompt", lambda row: _has_prompt(row) and bare(row), _prompt_only),
        Layout(
            "language modeling",
            "sft",
            "text",
            lambda row: is_text(row.get("text")) and bare(row),
            _never,
            refused="`text` does not say where the prompt ends and the answer begins, and only answers "
            "are trained; split it into prompt and completion, or into messages",
        ),
    ),
)
