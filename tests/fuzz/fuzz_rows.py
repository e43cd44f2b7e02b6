"""Good rows of every kind made from a seed, and what can be done to a cell, a row or a column of them.

Knows neither files nor the loader: fuzz_files.py writes the rows, fuzz_run.py reads them back.
"""

import datetime
import decimal
import json
import math
import random
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

SIGNS = "0123456789+-=;#"
KINDS = ("prompts", "trajectories", "preferences", "sft")
STRANGE_TEXTS = (
    "",
    " ",
    "\n",
    "\x00",
    "1\x002",
    "\ud800",  # half a surrogate pair, as a JSON escape can hold it
    "2\udfff1",
    "\u202e1+1=\u202c",
    "مرحبا 1+1=",
    "👩‍👩‍👧‍👦",
    "é" * 3,
    "\u2028\u2029\x85\x0b\x0c",
    "<eos>",
    "1<pad><eos>2",
    "[",
    "[]",
    "[1, 2",
    '[{"role": "user"}]',
    '{"role": "user", "content": "1"}',
    "null",
    "NaN",
    "{{ bos_token }}",
    "\ufeff1",
    "0" * 900,
)
STRANGE_NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    0,
    -1,
    1,
    -0.0,
    1e-320,
    1e308,
    3.5e38,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**64,
    -(2**63),
    10**40,
)
STRANGE_OTHERS: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    [None],
    [[]],
    [[1]],
    [{}],
    {"role": "user"},
    {"role": None, "content": None},
    [{"role": "user", "content": None}],
    [{"role": "assistant", "content": "1"}],
    [{"role": "user\n", "content": "1"}],
    [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}],
    [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "image", "image": "x"}]}],
    [{"role": "user", "content": "1"}, None],
    [{"role": "user", "content": "1", "tool_calls": [{"name": "f", "arguments": {"a": [1, None]}}]}],
    decimal.Decimal("1.50"),
    b"1+1=",
    b"\xff\xfe",
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime.date(2026, 1, 2),
    datetime.timedelta(days=1),
)


def good_rows(kind: str, draw: random.Random) -> list[Row]:
    """One to eight rows that load."""
    make = {"prompts": _prompt, "trajectories": _trajectory, "preferences": _pair, "sft": _demonstration}
    form, rows = draw.randrange(4), [make[kind](draw) for _ in range(draw.randint(1, 8))]
    for row in rows:
        if "prompt" in row:
            row["prompt"] = _as_form(row["prompt"], form)
    return rows


def harmed(rows: list[Row], draw: random.Random) -> list[Row]:
    """The rows after one to three of HARMS; their number stays."""
    for _ in range(draw.randint(1, 3)):
        rows = HARMS[draw.choice(sorted(HARMS))](rows, draw)
    return rows


def strange(draw: random.Random) -> Any:
    """A value that belongs in no column, or in another."""
    return draw.choice((*STRANGE_TEXTS, *STRANGE_NUMBERS, *STRANGE_OTHERS))


def _text(draw: random.Random, longest: int = 12) -> str:
    return "".join(draw.choice(SIGNS) for _ in range(draw.randint(1, longest)))


def _as_form(text: str, form: int) -> Any:
    messages = [{"role": "user", "content": text}]
    return (text, messages, json.dumps(messages), [{"role": "system", "content": "1"}, *messages])[form]


def _prompt(draw: random.Random) -> Row:
    truth = {"style": "rule", "ground_truth": draw.choice(("1", ["1", "2"], {"a": "1"}, "1000"))}
    extra = {"index": draw.randrange(9), "split": "train"}
    return {"prompt": _text(draw), "data_source": "made", "reward_model": truth, "extra_info": extra}


def _trajectory(draw: random.Random) -> Row:
    size = draw.randint(1, 10)
    row = _prompt(draw) | {
        "response_ids": [draw.randint(3, 17) for _ in range(size)] + [1],
        "behavior_log_probs": [-draw.random() for _ in range(size + 1)],
        "score": draw.choice((0.0, 1.0, -0.5)),
        "finish_reason": "stop",
        "temperature": draw.choice((1.0, 0.7)),
        "top_p": 1.0,
        "group": f"g{draw.randrange(3)}",
        "policy_version": draw.randrange(3),
    }
    if draw.random() < 0.3:
        row["response_mask"] = [draw.random() < 0.7 for _ in range(size)] + [True]
    if draw.random() < 0.2:
        row["token_level_scores"] = [0.0] * size + [row["score"]]
    if draw.random() < 0.3:
        of_tokens = ("response_ids", "behavior_log_probs", "response_mask", "token_level_scores")
        row = {key: value for key, value in row.items() if key not in of_tokens}
        row["response"] = _text(draw)
    if "response" in row and draw.random() < 0.5:
        turns = draw.randint(1, 3)
        row["response"] = [turn for _ in range(turns) for turn in _tool_use(draw)][1:]
        row["turn_scores"], row["score"] = [draw.choice((0.0, 0.5)) for _ in range(turns)], None
    return row


def _tool_use(draw: random.Random) -> list[Row]:
    """What a tool said, and what the assistant said of it."""
    return [{"role": "tool", "content": _text(draw)}, {"role": "assistant", "content": _text(draw)}]


def _pair(draw: random.Random) -> Row:
    chosen, rejected = _text(draw), _text(draw) + "9"
    if draw.random() < 0.3:
        both = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        return {"prompt": _text(draw), "chosen": both[0], "rejected": both[1], "margin": draw.random()}
    return {"prompt": _text(draw), "chosen": chosen, "rejected": rejected}


def _demonstration(draw: random.Random) -> Row:
    if draw.random() < 0.5:
        return {"prompt": _text(draw), "response": _text(draw)}
    turns = [_as_form(_text(draw), 1)[0], {"role": "assistant", "content": _text(draw)}]
    return {"messages": turns * draw.randint(1, 2)}


def _columns(rows: list[Row]) -> list[str]:
    return sorted({name for row in rows for name in row})


def _one_cell(rows: list[Row], draw: random.Random) -> list[Row]:
    """One cell becomes something else."""
    row, name = draw.choice(rows), draw.choice(_columns(rows) or ["prompt"])
    row[name] = strange(draw)
    return rows


def _inside_a_cell(rows: list[Row], draw: random.Random) -> list[Row]:
    """One element of a list, or one key of a struct, becomes something else."""
    row = draw.choice(rows)
    held = [name for name, value in row.items() if isinstance(value, list | dict) and value]
    if not held:
        return _one_cell(rows, draw)
    value = row[draw.choice(sorted(held))]
    value[draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))] = strange(
        draw
    )
    return rows


def _drop(rows: list[Row], draw: random.Random) -> list[Row]:
    gone = draw.choice(_columns(rows) or ["prompt"])
    return [{name: value for name, value in row.items() if name != gone} for row in rows]


def _nulls(rows: list[Row], draw: random.Random) -> list[Row]:
    name = draw.choice(_columns(rows) or ["prompt"])
    return [{**row, name: None} if draw.random() < 0.7 else row for row in rows]


def _retype(rows: list[Row], draw: random.Random) -> list[Row]:
    """A whole column in another type."""
    name, turn = draw.choice(_columns(rows) or ["prompt"]), draw.choice(RETYPED)
    return [{**row, name: turn(row[name])} if name in row else row for row in rows]


def _rename(rows: list[Row], draw: random.Random) -> list[Row]:
    old = draw.choice(_columns(rows) or ["prompt"])
    new = draw.choice(("", "a\nb", "\x00", "Prompt ", "😀", "prompt.x", "a" * 3000, "response", "chosen"))
    return [{new if name == old else name: value for name, value in row.items()} for row in rows]


def _lengths(rows: list[Row], draw: random.Random) -> list[Row]:
    """A list too long or too short."""
    row = draw.choice(rows)
    lists = sorted(name for name, value in row.items() if isinstance(value, list))
    if lists:
        name = draw.choice(lists)
        row[name] = row[name][:-1] if draw.random() < 0.5 else row[name] * draw.choice((2, 3, 40))
    return rows


def _huge(rows: list[Row], draw: random.Random) -> list[Row]:
    row, name = draw.choice(rows), draw.choice(_columns(rows) or ["prompt"])
    row[name] = draw.choice(("1" * 9_000, "[" * 9_000, [[{"a": "1" * 9}] * 2000], [7] * 9_000))
    return rows


def _deep(rows: list[Row], draw: random.Random) -> list[Row]:
    row, name, value = draw.choice(rows), draw.choice(_columns(rows) or ["prompt"]), strange(draw)
    for _ in range(draw.choice((3, 30))):
        value = {"a": value} if draw.random() < 0.5 else [value]
    row[name] = value
    return rows


def _twice(rows: list[Row], draw: random.Random) -> list[Row]:
    """The same row again."""
    rows[draw.randrange(len(rows))] = dict(draw.choice(rows))
    return rows


def _added(rows: list[Row], draw: random.Random) -> list[Row]:
    """A column of another kind, or of the user's own."""
    names = ("prompt_ids", "response", "response_mask", "messages", "chosen", "note", "baseline_score")
    name = draw.choice((*names, "turn_scores", "token_level_scores", "behavior_log_probs", "created"))
    return [{**row, name: strange(draw)} for row in rows]


HARMS: dict[str, Callable[[list[Row], random.Random], list[Row]]] = {
    "one cell": _one_cell,
    "inside a cell": _inside_a_cell,
    "column dropped": _drop,
    "nulls": _nulls,
    "column retyped": _retype,
    "column renamed": _rename,
    "lengths": _lengths,
    "huge": _huge,
    "deep": _deep,
    "row twice": _twice,
    "column added": _added,
    "nothing": lambda rows, draw: rows,
}


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else len(str(value))


RETYPED: tuple[Callable[[Any], Any], ...] = (
    str,
    lambda value: json.dumps(value, default=str),
    lambda value: [value],
    lambda value: {"value": value},
    lambda value: json.dumps(json.dumps(value, default=str)),
    lambda value: [float(_number(v)) for v in value] if isinstance(value, list) else float(_number(value)),
    lambda value: (
        [decimal.Decimal(int(_number(v)) % 999) for v in value] if isinstance(value, list) else value
    ),
    lambda value: str(value).encode("utf-8", "replace"),
    lambda value: bool(value),
    lambda value: [str(v) for v in value] if isinstance(value, list) else [str(value)],
)
