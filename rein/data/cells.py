"""One cell in, one typed value out: a column's value as text, messages, ids, numbers or a struct, or BadRow.

Lists and structs may come as JSON text, text as bytes, numbers as decimals, whole numbers as floats: writers
differ. A missing cell is None. Knows no column's meaning.
"""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np

from rein.data.rejects import BadRow
from rein.types import Floats, Ids, Mask, Message

EXACT = 2.0**53  # below, a float is the whole number that was written


def at(row: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key: `extra_info.question` reaches into structs, JSON text of one too."""
    if key in row:
        return row[key]
    root, _, rest = key.partition(".")
    value = row.get(root)
    if not rest or value is None:
        return None
    return at(struct(value, root), rest)


def decoded(value: Any) -> Any:
    """The value with bytes that are UTF-8 as text, at every depth: not every writer marks text as such."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {key: decoded(inner) for key, inner in value.items()}
    if isinstance(value, list) and isinstance(
        next((v for v in value if v is not None), None), dict | list | bytes
    ):
        return [decoded(inner) for inner in value]
    return value


def text(value: Any, name: str) -> str:
    """A string that is valid Unicode."""
    if not isinstance(value, str):
        raise BadRow("wrong type", f"{name} is {_kind(value)}, not text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("wrong type", f"{name} is not valid Unicode at character {error.start}") from error
    return value


def messages_or_text(value: Any, name: str) -> list[Message] | str:
    """Chat messages, the JSON text of some, one message, or plain text."""
    if isinstance(value, str):
        found = _messages_in(value)
        if found is None:
            return text(value, name)
        value = found
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow("wrong type", f"{name} is {_kind(value)}, not text or a list of messages")
    if not value:
        raise BadRow("no tokens", f"{name} is an empty list of messages")
    return [_message(turn, f"{name}[{i}]") for i, turn in enumerate(value)]


def ids(value: Any, name: str, vocab_size: int) -> Ids | None:
    """Token ids, untouched; one outside of the vocabulary is named."""
    array = _array(value, name)
    if array is None:
        return None
    if array.dtype.kind == "f" and (array == np.floor(array)).all() and (abs(array) < EXACT).all():
        array = array.astype(np.int64)  # how pandas writes whole numbers
    if array.size and array.dtype.kind not in "iu":
        raise BadRow("wrong type", f"{name} holds {_content(array)}, not integers")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size)) if array.size else array
    if outside.size:
        place = int(outside[0])
        why = "which is negative" if array[place] < 0 else f"vocabulary {vocab_size}"
        raise BadRow("id outside of the vocabulary", f"{name}[{place}] is {array[place]}, {why}")
    return array.astype(np.int64)


def floats(value: Any, name: str) -> Floats | None:
    """Numbers, one a token; a null among them becomes NaN."""
    array = _array(value, name)
    if array is None:
        return None
    if array.dtype == object and all(v is None or isinstance(v, int | float) for v in array):
        array = np.array([math.nan if v is None else _rounded(v) for v in array])
    if array.size and array.dtype.kind not in "iuf":
        raise BadRow("wrong type", f"{name} holds {_content(array)}, not numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def mask(value: Any, name: str) -> Mask | None:
    """True, False, 1 or 0, one a token."""
    array = _array(value, name, mask=True)
    if array is None:
        return None
    if array.size and (array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all()):
        raise BadRow("wrong type", f"{name} holds {_content(array)}, not true and false")
    return array.astype(np.bool_)


def number(value: Any, name: str) -> float | None:
    """A number; true and false count as 1 and 0. NaN passes: what it means is the column's matter."""
    if value is None:
        return None
    if isinstance(value, bool | int | float | Decimal | np.number | np.bool_):
        try:
            return float(value)
        except (OverflowError, ValueError) as error:
            raise BadRow("wrong type", f"{name} is too large for a number") from error
    raise BadRow("wrong type", f"{name} is {_kind(value)}, not a number")


def tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Descriptions of functions, or the JSON text of these, as {"type": "function", "function": ...}."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, str):
        value = _json(value, value) if value.strip() else []
    found = value if isinstance(value, list) else [] if value is None else [value]
    found = [_json(each, each) if isinstance(each, str) else each for each in found]
    if not all(isinstance(each, dict) and each for each in found):
        raise BadRow("tools", f"{name} is no list of function descriptions, nor the JSON text of one")
    return [_function(each) for each in found] or None


def struct(value: Any, name: str) -> dict[str, Any]:
    """A struct, or the JSON text of one; an absent one is empty."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = _json(value, value)
    if isinstance(value, dict):
        return value
    raise BadRow("wrong type", f"{name} is {_kind(value)}, not a struct")


def label(value: Any, name: str) -> str:
    """A short name: text, a UUID, or a whole number as text; absent is empty."""
    if value is None:
        return ""
    if isinstance(value, float) and value != value:  # how pandas writes that nothing is there
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal):
        return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
    return str(value) if isinstance(value, UUID) else text(value, name)


def _rounded(value: int | float) -> float:
    """The nearest float, infinite where there is none."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _undecimal(value: Any) -> Any:
    if not isinstance(value, Decimal) or not value.is_finite():
        return None if isinstance(value, Decimal) else value
    return int(value) if value == value.to_integral_value() else float(value)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """A description that stands bare, as LLaMA-Factory writes it, in what chat templates look into."""
    if "function" in tool or "name" not in tool or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: inner for key, inner in tool.items() if key != "type"}}


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise BadRow("wrong type", f"{name} is no message: it needs a role and content")
    content = value.get("content")
    if isinstance(content, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
    ):
        content = "".join(part["text"] for part in content)
    if content is None and value.get("tool_calls"):
        content = ""
    return {**value, "content": text(content, f"{name}.content")}


def _messages_in(value: str) -> list[Any] | None:
    """The messages that a text holds as JSON; None where it is just text."""
    if not value.lstrip().startswith("["):
        return None
    found = _json(value, None)
    if isinstance(found, list) and found and all(isinstance(turn, dict) and "role" in turn for turn in found):
        return found
    return None


def _array(value: Any, name: str, *, mask: bool = False) -> np.ndarray[Any, Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = _json(value, value)
    if not isinstance(value, list | tuple | np.ndarray):
        raise BadRow("wrong type", f"{name} is {_kind(value)}, not a list")
    kinds = set(map(type, value))
    if kinds & {list, dict, str, bytes}:
        raise BadRow("wrong type", f"{name} holds lists, structs or text, not numbers")
    if bool in kinds and len(kinds) > 1 and not (mask and kinds == {bool, int}):
        raise BadRow("wrong type", f"{name} holds true and false among other values")
    if Decimal in kinds:
        value = [_undecimal(item) for item in value]
    try:
        return np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise BadRow("wrong type", f"{name} is no list of numbers") from error


def _json(value: str, otherwise: Any) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return otherwise


def _kind(value: Any) -> str:
    names = {
        "NoneType": "missing",
        "str": "text",
        "dict": "a struct",
        "list": "a list",
        "int": "a number",
        "float": "a number",
        "bool": "true or false",
    }
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _content(array: np.ndarray[Any, Any]) -> str:
    return "nulls or mixed values" if array.dtype == object else f"{array.dtype} values"
