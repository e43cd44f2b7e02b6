"""What a completions endpoint says of one answer: its JSON in, token ids with their log-probs out.

vLLM and SGLang give `token_ids`, llama.cpp an `id` with each log-prob, vLLM also texts like `token_id:17`.
Where there are only the texts of the tokens they are mapped back, if each is the text of one token alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rein.engines.board import STOP_TEXT_WINDOW
from rein.errors import EngineError, shown
from rein.protocols import Tokenizer
from rein.types import Completion

AS_TEXT = "token_id:"


class Ended(NamedTuple):
    """Up to which token an answer goes, and why."""

    length: int
    reason: str  # stop, length, or "" where no stop is among the tokens though the server stopped


class Choices:
    """Reads the answers of one server, which has the same tokenizer. `where` is for messages."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        stop_texts: Sequence[str],
        *,
        vocabulary: int,  # entries
        where: str,
    ) -> None:
        self.tokenizer, self.vocabulary, self.where = tokenizer, vocabulary, where
        self.stop_ids, self.stop_texts = frozenset(stop_ids), tuple(stop_texts)

    def read(self, choice: Mapping[str, Any], room: int, *, texts_sent: bool) -> Completion | None:
        """The answer, with the token that ended it; None where the server kept a stop text's tokens back.

        `texts_sent`: it was told of the stop texts. Raises EngineError where something of it is missing.
        """
        if texts_sent and choice.get("finish_reason") == "stop" and not choice.get("logprobs"):
            return None  # the stop text was all of it
        ids, log_probs = self._tokens(choice)
        if len(ids) != len(log_probs):
            raise self._error(
                f"gives {len(log_probs)} log-probs of {len(ids)} tokens", "one of each is needed"
            )
        if not ids:
            raise self._error("gives an answer without tokens", "the token that ends it must be among them")
        if not all(0 <= i < self.vocabulary for i in ids):
            raise self._error(
                f"gives token id {max(ids, key=abs)}, beyond the {self.vocabulary} of the model's vocabulary",
                "serve the model of rollout.path",
            )
        end = self._end(ids, room, str(choice.get("finish_reason")))
        if not end.reason:
            if texts_sent:
                return None
            raise self._error(
                f"stopped an answer at token {ids[-1]}, which is no stop id of the model, or left its last "
                "token out",
                "its stop ids must be the model's, and belong to token ids and log-probs",
            )
        return Completion(
            np.array(ids[: end.length], dtype=np.int64),
            np.array(log_probs[: end.length], dtype=np.float32),
            end.reason,
        )

    def _tokens(self, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        said = choice.get("logprobs")
        if not isinstance(said, dict):
            raise self._error("gives no log-probs", "its completions must answer `logprobs`")
        if isinstance(said.get("content"), list):  # llama.cpp
            entries = said["content"]
            log_probs = [entry.get("logprob") for entry in entries]
            texts = [entry.get("token") for entry in entries]
            named = [entry.get("id") for entry in entries]
        else:
            log_probs, texts, named = said.get("token_logprobs") or [], said.get("tokens") or [], [None]
        if bad := [p for p in log_probs if not isinstance(p, int | float) or not math.isfinite(p)]:
            raise self._error(f"gives a log-prob that is {bad[0]}", "every sampled token's is needed")
        ids = choice.get("token_ids")
        if ids is None:
            whole = all(isinstance(i, int) for i in named)
            ids = named if whole else self._of_texts(texts, str(choice.get("text", "")))
        return [int(i) for i in ids], [float(p) for p in log_probs]

    def _of_texts(self, texts: Sequence[Any], text: str) -> list[int]:
        """The ids of tokens by what they read. Raises EngineError where that could be others."""
        ids = []
        for token in texts:
            numbered = str(token).removeprefix(AS_TEXT)
            if numbered != token and numbered.isdecimal():
                ids.append(int(numbered))
                continue
            known = self._by_text.get(token, [])
            if len(known) != 1:
                what = f"{len(known)} tokens of the model read so" if known else "no token of the model does"
                raise self._error(
                    f"gives token texts without ids, one of them {shown(repr(token))}, and {what}",
                    "use one that answers `return_token_ids`, such as vLLM, SGLang or llama.cpp's own",
                )
            ids.append(known[0])
        if not any(str(token).startswith(AS_TEXT) for token in texts):
            self._agrees(ids, text)
        return ids

    def _agrees(self, ids: Sequence[int], text: str) -> None:
        """Raises EngineError where the tokens do not read as the answer does; the stop's text may be kept."""
        mine = self.tokenizer.decode(list(ids))
        plain = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        if not mine.startswith(text) and not plain.startswith(text):
            raise self._error(
                f"gives the text {shown(repr(text))} of tokens that read {shown(repr(mine))} here",
                "use one that answers `return_token_ids`",
            )

    @cached_property
    def _by_text(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i in range(min(len(self.tokenizer), self.vocabulary)):
            found.setdefault(self.tokenizer.decode([i]), []).append(i)
        return found

    def _end(self, ids: Sequence[int], room: int, reason: str) -> Ended:
        """As HfEngine ends an answer: by the first stop id, or the token that completes a stop text."""
        texts = self.stop_texts
        if texts and not any(stop in self.tokenizer.decode(list(ids)) for stop in texts):
            texts = ()
        for i, token in enumerate(ids[:room]):
            if token in self.stop_ids:
                return Ended(i + 1, "stop")
            if texts:
                tail = self.tokenizer.decode(list(ids[max(i + 1 - STOP_TEXT_WINDOW, 0) : i + 1]))
                if any(stop in tail for stop in texts):
                    return Ended(i + 1, "stop")
        whole = reason == "length" or len(ids) >= room
        return Ended(min(len(ids), room), "length" if whole else "")

    def _error(self, what: str, todo: str) -> EngineError:
        return EngineError(f"{self.where}: the server {what}; {todo}")
