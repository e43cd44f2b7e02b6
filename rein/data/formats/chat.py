"""Chat turns in any tool's words in, Rein's messages out: role, content, tool_calls.

Reads role/content and from/value, content in parts, tool calls as OpenAI's field, as a turn of their own and
as parts, reasoning as a field and as parts. What is no text (images, audio) makes the row unusable, since an
answer about a picture teaches nothing without it.
"""

import json
from typing import Any, Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.layout import Source, absent
from rein.data.rejects import BadRow
from rein.types import Message

ASSISTANT: Final = "assistant"
ROLES: Final = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "bard", "bing", "ai"), ASSISTANT),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call", "function-call"), "call"),
}
TOOLS: Final = ("tools", "functions")
MEDIA: Final = ("images", "image", "videos", "video", "audios", "audio")

THINKING = "reasoning stands in the content as <think> text, for any chat template to show"
DEVELOPER = "developer turns became system turns"


def turns(value: Any, name: str, source: Source) -> list[Message]:
    """Messages of a list of turns, the JSON text of one, or a single turn."""
    if isinstance(value, str):
        found = parsed(value)
        if not isinstance(found, list | dict):
            raise BadRow("wrong type", f"{name} is text, not a list of messages")
        value = found
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRow("no messages", f"{name} holds no messages")
    return [_turn(item, f"{name}[{i}]", source) for i, item in enumerate(value)]


def text_or_turns(value: Any, name: str, source: Source) -> list[Message] | str:
    """Plain text as it is, anything else as messages; the JSON text of messages counts as those."""
    if isinstance(value, str):
        found = parsed(value) if value.lstrip().startswith("[") else None
        if not (isinstance(found, list) and found and all(_is_turn(turn) for turn in found)):
            return cells.text(value, name)
    return turns(value, name, source)


def with_system(system: Any, messages: list[Message]) -> list[Message]:
    """The system text first, unless the messages have their own."""
    if absent(system) or not str(system).strip() or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": cells.text(system, "system")}, *messages]


def text_only(source: Source) -> None:
    """Refuse a row with pictures, sound or film."""
    for name in MEDIA:
        if source.peek(name):
            raise BadRow("not only text", f"{name} are not read, and the answer may rest on them")
        source.leave("empty in every row", name)


def keep_tools(source: Source) -> str | None:
    """The tools that the row describes. Raises BadRow where they cannot be read."""
    for name in TOOLS:
        try:
            found = tools_text(source.peek(name), name)
        except BadRow:
            if name == s.TOOLS:
                raise
            continue  # a column of another meaning
        if found is not None:
            source.take(s.TOOLS, name)
            return found
        source.leave("no tools in any row", name)
    return None


def tools_text(value: Any, name: str = s.TOOLS) -> str | None:
    """Descriptions of tools as JSON text: in a column of structs their keys would mix."""
    found = cells.tools(value, name)
    return None if found is None else json.dumps(found, ensure_ascii=False)


def answer_text(message: Message) -> list[Message] | str:
    """A response as text, or as a message where it calls tools."""
    return [message] if message.get("tool_calls") else str(message["content"])


def thought(reasoning: str, content: str) -> str:
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content.lstrip()}"


def parsed(value: str) -> Any:
    """What a text holds as JSON; None where it is none."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _turn(value: Any, name: str, source: Source) -> Message:
    if not _is_turn(value):
        raise BadRow("wrong type", f"{name} is no message: it needs a role and content")
    written = str(value.get("role", value.get("from"))).strip()
    role = ROLES.get(written.lower())
    if role is None:
        raise BadRow("unknown role", f"{name} has the role {written!r}; known: {', '.join(sorted(ROLES))}")
    if written.lower() == "developer":
        source.note(DEVELOPER)
    content, reasoning, calls = _content(_first(value, "content", "value", "text"), name)
    if role == "call":
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls(content, name)}
    message: Message = {"role": role, "content": content}
    given = value.get("tool_calls") or ([value["function_call"]] if value.get("function_call") else [])
    given = parsed(given) if isinstance(given, str) else given
    if isinstance(given, list) and given:
        calls = [*calls, *(_call(call, name) for call in given)]
    if calls:
        message["tool_calls"] = calls
    reasoning = reasoning or _first(value, "reasoning_content", "reasoning", "thinking") or ""
    if reasoning and role == ASSISTANT:
        source.note(THINKING)
        message["content"] = thought(str(reasoning), content)
    for kept in ("name", "tool_call_id"):
        if isinstance(value.get(kept), str):
            message[kept] = value[kept]
    return message


def _content(value: Any, name: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, reasoning and tool calls of a message's content."""
    if value is None:
        return "", "", []
    if isinstance(value, str):
        return cells.text(value, name), "", []
    if isinstance(value, dict):
        value = (
            [value] if "type" in value or "text" in value else [{"type": "text", "text": json.dumps(value)}]
        )
    if not isinstance(value, list):
        raise BadRow("wrong type", f"{name} has content that is a {type(value).__name__}, not text")
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for part in value:
        part = {"text": part} if isinstance(part, str) else part
        kind = str(part.get("type", "text")) if isinstance(part, dict) else "nothing"
        inner = _first(part, "text", "value", kind, "content") if isinstance(part, dict) else None
        if kind == "tool_call":
            calls += _calls(inner, name)
        elif kind in ("reasoning", "thinking"):
            thoughts.append(cells.text(inner, name))
        elif kind in ("text", "input_text", "output_text", "refusal") and isinstance(inner, str):
            texts.append(cells.text(inner, name))
        elif inner is not None or kind != "text":
            raise BadRow("not only text", f"{name} has a part of type {kind!r}, which is not read")
    return "".join(texts), "\n".join(thoughts), calls


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    found = parsed(value) if isinstance(value, str) else value
    if not isinstance(found, dict | list) or not found:
        raise BadRow("tool call", f"{name} is a tool call but holds no JSON of one")
    return [_call(call, name) for call in (found if isinstance(found, list) else [found])]


def _call(value: Any, name: str) -> dict[str, Any]:
    inner = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadRow("tool call", f"{name} has a tool call without a name")
    arguments = _first(inner, "arguments", "parameters")
    arguments = {} if arguments is None else arguments
    found = parsed(arguments) if isinstance(arguments, str) else arguments
    call: dict[str, Any] = {
        "name": inner["name"],
        "arguments": found if isinstance(found, dict) else arguments,
    }
    kept = {"id": value["id"]} if isinstance(value.get("id"), str) else {}
    return {**kept, "type": "function", "function": call}


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role", value.get("from")), str)


def _first(value: dict[str, Any], *names: str) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)
