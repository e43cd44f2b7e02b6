"""A row's values in the types of their columns, or BadRow: what is written must not fail for one odd cell."""

import json
import math
from typing import Any, Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.layout import LARGEST, absent, whole_numbers
from rein.data.parquet import Row
from rein.data.rejects import BadRow

NUMBERS: Final = (s.SCORE, s.BASELINE_SCORE, s.MARGIN, s.TEMPERATURE, s.TOP_P)
LABELS: Final = (s.FINISH_REASON, s.BEHAVIOR_POLICY, s.GROUP, s.DATA_SOURCE, s.ABILITY)
IDS: Final = (s.PROMPT_IDS, s.RESPONSE_IDS)
PER_TOKEN: Final = (s.BEHAVIOR_LOG_PROBS, s.TOKEN_LEVEL_SCORES)
FREE: Final = (
    *(s.PROMPT, s.RESPONSE, s.CHOSEN, s.REJECTED, s.MESSAGES, s.TOOLS),
    *(s.REWARD_MODEL, s.EXTRA_INFO),
)


def typed(row: Row) -> Row:
    """The row as it can be written."""
    made = {name: value for name, value in row.items() if not absent(value)}
    for name in NUMBERS:
        if name in made:
            made[name] = _number(made[name], name)
    for name in LABELS:
        if name in made:
            made[name] = cells.label(made[name], name)
    for name in IDS:
        if name in made:
            made[name] = whole_numbers(made[name], name)
    for name in PER_TOKEN:
        if name in made:
            found = cells.floats(made[name], name)
            made[name] = None if found is None else found.tolist()
    if s.RESPONSE_MASK in made:
        mask = cells.mask(made[s.RESPONSE_MASK], s.RESPONSE_MASK)
        made[s.RESPONSE_MASK] = None if mask is None else mask.tolist()
    if s.POLICY_VERSION in made:
        version = _number(made[s.POLICY_VERSION], s.POLICY_VERSION)
        if not version.is_integer():
            raise BadRow("wrong type", f"policy_version is {version:g}, not a whole number")
        made[s.POLICY_VERSION] = int(version)
    for name in FREE:
        if name in made:
            made[name] = _plain(made[name], name)
    return made


def _number(value: Any, name: str) -> float:
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise BadRow(f"{name} not finite", f"{name} is too large for a number")
    found = cells.number(value, name)
    if found is None or not math.isfinite(found):
        raise BadRow(f"{name} not finite", f"{name} is {value}")
    return found


def _plain(value: Any, name: str) -> Any:
    """The value with what JSON has no form for as text."""
    try:
        written = json.dumps(value, ensure_ascii=False)
    except TypeError:
        written = json.dumps(value, ensure_ascii=False, default=_text)
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise BadRow("wrong type", f"{name} cannot be written as JSON") from error
    try:
        written.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("wrong type", f"{name} is not valid Unicode") from error
    return value


def _text(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
