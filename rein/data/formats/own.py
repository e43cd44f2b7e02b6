"""Rein's own four kinds of file as a format, so that one can be made into another: scored rows into pairs."""

from collections.abc import Callable
from typing import Any, Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.chat import text_or_turns, turns
from rein.data.formats.layout import Format, Layout, Source, absent, bare, has_any
from rein.data.parquet import Row

_TURNS: Final = (s.PROMPT, s.RESPONSE, s.CHOSEN, s.REJECTED, s.MESSAGES)


def _reader(names: list[str]) -> Callable[[Source], list[Row]]:
    def read(source: Source) -> list[Row]:
        row: dict[str, Any] = {name: source.take(name, name) for name in names if name != s.TOOLS}
        for name in _TURNS:
            if row.get(name) is not None:
                read_as = turns if name == s.MESSAGES else text_or_turns
                row[name] = read_as(row[name], name, source)
        for name in (s.REWARD_MODEL, s.EXTRA_INFO):
            row[name] = cells.struct(row.get(name), name) or None
        return [row]

    return read


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(not absent(row.get(name)) for name in names)


def _unjudged(row: Row) -> bool:
    """Prompt and response, with no verdict under another name than score."""
    judged = has_any(row, "is_correct", "correct", "correctness", "passed", "verdict", "reward")
    return _has(s.PROMPT, s.RESPONSE)(row) and not (judged and absent(row.get(s.SCORE)))


_trajectory = _reader(s.TRAJECTORIES.names)

REIN: Final = Format(
    "Rein's own files, to make one kind into another",
    (
        Layout(
            "preferences",
            "preferences",
            "prompt, chosen, rejected",
            _has(s.PROMPT, s.CHOSEN, s.REJECTED),
            _reader(s.PREFERENCES.names),
        ),
        Layout("trajectories", "trajectories", "prompt, response", _unjudged, _trajectory),
        Layout(
            "trajectories by ids",
            "trajectories",
            "prompt_ids, response_ids",
            _has(s.PROMPT_IDS, s.RESPONSE_IDS),
            _trajectory,
        ),
        Layout("demonstrations", "sft", "messages", _has(s.MESSAGES), _reader(s.SFT.names)),
        Layout(
            "prompts",
            "prompts",
            "prompt",
            lambda row: _has(s.PROMPT)(row) and bare(row),
            _reader(s.PROMPTS.names),
        ),
    ),
)
