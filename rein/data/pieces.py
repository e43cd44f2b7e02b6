"""Token ids in, a piece of text for each out: what people read token by token. Knows no row and no file."""

from collections.abc import Iterable

from rein.protocols import Tokenizer


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> dict[int, str]:
    """The text of each id by itself; U+FFFD for a part of a character, `<id>` for what is no token."""
    return {one: _piece(tokenizer, one) for one in set(map(int, ids))}


def whole_text(text: str) -> str:
    """The text without halves of characters, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _piece(tokenizer: Tokenizer, one: int) -> str:
    """The second of two: the first one of a text loses its space where a tokenizer marks words by it."""
    try:
        first, both = tokenizer.decode([one]), tokenizer.decode([one, one])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return f"<{one}>"
    return whole_text(both.removeprefix(first) if both.startswith(first) else first)
