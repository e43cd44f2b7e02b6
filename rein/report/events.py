"""What guards saw and did, for the page: the journal's standing lines in; a sentence, a table and marks out.

A user's rule may have written any text into a line, so each is cut and shown as text. Knows no file.
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import escape

from rein.errors import shown

Line = Mapping[str, Any]

MOST_EVENTS = 200  # in the table and on the curves
LONGEST_CELL, LONGEST_OUTCOME = 300, 1000  # characters
HOVER_WIDTH = 52  # characters of a line that hovering shows

FACTORS = {
    "lr": "learning rate",
    "critic_lr": "critic's learning rate",
    "kl_coef": "KL coefficient",
    "token_budget": "token budget",
}
VALUES = {
    "kl_coef_at": "KL coefficient",
    "entropy_coeff": "entropy coefficient",
    "grad_clip": "gradient clip",
    "temperature": "rollout temperature",
    "reward_clip": "reward clip",
    "ppo_epochs": "PPO epochs",
}
COUNTED = {  # what a run is said to have had, by the action of its events: one, several
    "rollback": ("rollback", "rollbacks"),
    "skip": ("update skipped", "updates skipped"),
    "stop_epochs": ("batch cut short", "batches cut short"),
    "refresh": ("round of fresh rollouts asked for", "rounds of fresh rollouts asked for"),
    "pause": ("pause", "pauses"),
    "stop": ("stop", "stops"),
    "out of memory": ("time out of memory", "times out of memory"),
    "soften": ("softening", "softenings"),
    "alert": ("alert", "alerts"),
}
ROLLBACKS = ("rollback", "rollback_to_best")
KINDS = {"out_of_memory": "out of memory", "decay": "relaxed"}  # of lines that no rule caused


@dataclass(slots=True)
class Event:
    """One row of the table, all of it text but its place."""

    number: int
    rule: str
    seen: str
    action: str
    changed: str
    back: int | None = None  # the update that a rollback went back to

    @property
    def said(self) -> str:
        """kl_high: probe/kl_reference 0.31 is above 0.3: rollback, back to 40; learning rate x1 → x0.3"""
        back = "" if self.back is None else f", back to {self.back}"
        what = f"{self.rule}: {self.seen}" if self.rule else self.seen
        return f"{what}: {self.action}{back}" + (f"; {self.changed}" if self.changed else "")


def section(lines: Sequence[Line]) -> dict[str, Any]:
    """The section of the page; where there are too many events, alerts are left out first, then late ones."""
    every = events(lines)
    order = sorted(range(len(every)), key=lambda i: (every[i].action == "alert", i))
    kept = [every[i] for i in sorted(order[:MOST_EVENTS])]
    return {
        "outcome": outcome(lines, every),
        "events": kept,
        "left_out": len(every) - len(kept),
        "marks": marks(kept),
        "undone": [[e["to"], e["from"]] for e in lines if _rollback(e) and e["to"] < e["from"]],
    }


def events(lines: Sequence[Line]) -> list[Event]:
    """In order; a rollback is one with the verdict that asked for it."""
    found: list[Event] = []
    asked: Event | None = None
    for line in lines:
        if _rollback(line):
            if asked is None:  # of a journal that lost the verdict
                asked = _event(line, "rollback")
                found.append(asked)
            asked.back, asked = line["to"], None
            continue
        kind = str(line.get("kind"))
        asks = line.get("action") == "refresh"
        if kind == "end" and asks and found and found[-1].action == "refresh":
            continue  # a verdict has said so
        action = str(line.get("action")) if kind == "verdict" or asks else KINDS.get(kind, kind)
        event = _event(line, action)
        found.append(event)
        asked = event if event.action in ROLLBACKS else asked
    return found


def _rollback(line: Line) -> bool:
    whole = isinstance(line.get("from"), int) and isinstance(line.get("to"), int)
    return line.get("kind") == "rollback" and whole


def _event(line: Line, action: str) -> Event:
    number = line.get("number")
    moved = [_moved(str(name), pair) for name, pair in _changes(line).items()]
    if rows := _left_out(line):
        moved.append(_count(len(rows), "row left out", "rows left out"))
    return Event(
        number if isinstance(number, int) else 0,
        _cell(line.get("rule", "")),
        _seen(line),
        _cell(action),
        _cell(", ".join(moved)),
    )


def _seen(line: Line) -> str:
    """The reason, which names metric, value and limit where a rule of the recipe wrote it."""
    reason, metric = str(line.get("reason", "")), str(line.get("metric", ""))
    if not metric or metric in reason:
        return _cell(reason)
    held = f"{metric} {_number(line.get('value'))}, limit {_number(line.get('limit'))}"
    return _cell(f"{reason}; {held}" if reason else held)


def _changes(line: Line) -> Mapping[str, Any]:
    changed = line.get("changed")
    pairs = changed if isinstance(changed, Mapping) else {}
    return {name: pair for name, pair in pairs.items() if isinstance(pair, list) and len(pair) == 2}


def _left_out(line: Line) -> list[str]:
    rows = line.get("excluded")
    return [str(row) for row in rows] if isinstance(rows, list) else []


def _moved(name: str, pair: Sequence[Any]) -> str:
    before, after = (_setting(name, value) for value in pair)
    return f"{FACTORS.get(name) or VALUES.get(name, name)} {before} → {after}"


def _setting(name: str, value: Any) -> str:
    if value is None:
        return "recipe's"
    if name in FACTORS:
        return f"x{_number(value)}"
    if name == "ppo_epochs" and isinstance(value, int):
        return f"{value:+d}"
    return " to ".join(map(_number, value)) if isinstance(value, list) else _number(value)


def outcome(lines: Sequence[Line], found: Sequence[Event]) -> str:
    """2 rollbacks, 3 updates skipped, learning rate now x0.15."""
    if not found:
        return "No guard fired."
    said = []
    for action, (one, several) in COUNTED.items():
        # Several rules may ask for one update to be skipped; every other event counts for itself.
        same = ROLLBACKS if action == "rollback" else (action,)
        numbers = [event.number for event in found if event.action in same]
        count = len(set(numbers)) if action in ("skip", "stop_epochs") else len(numbers)
        said += [_count(count, one, several)] if count else []
    now = {name: pair[1] for line in lines for name, pair in _changes(line).items()}
    said += [
        f"{FACTORS.get(name) or VALUES.get(name, name)} now {_setting(name, value)}"
        for name, value in now.items()
        if value not in (None, 0) and not (name in FACTORS and value == 1)
    ]
    rows = {row for line in lines for row in _left_out(line)}
    said += [_count(len(rows), "row left out", "rows left out")] if rows else []
    return shown(f"{', '.join(said) or _count(len(found), 'event', 'events')}.", LONGEST_OUTCOME)


def marks(found: Sequence[Event]) -> list[dict[str, Any]]:
    """One mark for each update at which there were events: how grave, the label, what hovering shows."""
    at: dict[int, list[Event]] = {}
    for event in found:
        at.setdefault(event.number, []).append(event)
    return [
        {
            "x": number,
            "kind": _kind(those),
            "label": _label(those),
            "text": "<br>".join(_wrapped(event.said) for event in those),
        }
        for number, those in at.items()
    ]


def _label(found: Sequence[Event]) -> str:
    back = [f"back to {event.back}" for event in found if event.back is not None]
    return back[0] if back else "fresh rollouts" if _kind(found) == "round" else ""


def _kind(found: Sequence[Event]) -> str:
    if any(event.back is not None for event in found):
        return "rollback"
    if all(event.action == "refresh" for event in found):
        return "round"
    return "alert" if all(event.action in ("alert", "soften", "relaxed") for event in found) else "action"


def _wrapped(text: str) -> str:
    """Plotly reads tags in what hovering shows: lines are broken by one, all else is text."""
    return "<br>".join(str(escape(line)) for line in textwrap.wrap(text, HOVER_WIDTH))


def _cell(value: Any) -> str:
    return shown(str(value), LONGEST_CELL)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
