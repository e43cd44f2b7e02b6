"""Text of models and files as it may stand on a page."""

import json
from typing import Any

LONGEST_TEXT = 4000  # characters that are shown


def shown(value: Any) -> str:
    """Text as it may stand on a page: not too long, without control characters and halves of characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = len(text) - LONGEST_TEXT
    text = text[:LONGEST_TEXT] + (f" … ({cut} more characters)" if cut > 0 else "")
    text = "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0x9F else "\ufffd" for c in text)
    return text.encode("utf-8", "replace").decode("utf-8")
