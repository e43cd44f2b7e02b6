"""What stands for the tokenizer where none is given: every text is one token, so that rows can be judged.

Through it the loader's own readers say everything of a row that does not depend on a vocabulary, a chat
template or a length limit of text: those it never finds wrong. A prompt without a character it does, as raw
text would be. Ids of text mean nothing.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn

from rein.data.tokenize import Encoder

END = -1  # ends every answer; no stored id is negative
ANY_ID = 2**63 - 1


class StandIn:
    """Implements protocols.Tokenizer but for saving."""

    chat_template = "one token a text, none of the tools"
    eos_token_id: int | None = END
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __len__(self) -> int:
        return 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [_token(text)] if text else []

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return ""

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """A token for each text, and the end behind an answer."""
        found = []
        for turn in messages:
            found += self.encode(str(turn["content"]))
            found += [END] if turn["role"] == "assistant" else []
        return found

    def save_pretrained(self, path: str) -> NoReturn:
        raise NotImplementedError("there is no tokenizer to save")


def stand_in_encoder() -> Encoder:
    """An Encoder that refuses what no tokenizer would make usable."""
    return Encoder(StandIn(), apply_chat_template=True, stop_ids={END}, vocab_size=ANY_ID)


def _token(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
