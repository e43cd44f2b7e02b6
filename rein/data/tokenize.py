"""Messages or text in, token ids out, and ids back to text.

The chat template is applied once and is the only writer of special tokens in chat mode, so there is exactly
one BOS; in raw mode the tokenizer's own BOS precedes the prompt once. Where the tokens of a prompt are not
the first tokens of prompt + response (a merge across the seam, a template that rewrites turns), both sides
are tokenised apart: what is trained are then the tokens that generation would have seen. Masks come from
positions, never from ids. Knows no file and no row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rein.data.files import first_line
from rein.data.rejects import LIMIT_KINDS, BadRow
from rein.errors import ConfigError
from rein.protocols import Tokenizer
from rein.types import Ids, Mask, Message

ASSISTANT = "assistant"
_PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "a"}]


class Encoder:
    """A tokenizer with its template and stop ids, used in one way everywhere.

    `apply_chat_template` None means: where the tokenizer has a template. Raises ConfigError when one is
    asked for and there is none, and when nothing ends a response.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        apply_chat_template: bool | None,
        stop_ids: Collection[int],
        vocab_size: int | None = None,  # default: the tokenizer's
    ) -> None:
        if apply_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                "data.apply_chat_template: the tokenizer has no chat template; set it to false or add one"
            )
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if apply_chat_template is None else apply_chat_template
        eos = tokenizer.eos_token_id
        self.stop_ids = frozenset(int(i) for i in stop_ids) or frozenset(() if eos is None else (eos,))
        if not self.stop_ids:
            raise ConfigError("model: the tokenizer has no EOS and no stop id is given; set eos_token in it")
        self.vocab_size = vocab_size or _vocabulary(tokenizer)
        self.tools: list[dict[str, Any]] | None = None  # what the chat template is told of
        self.untrained_turns = Counter[str]()  # assistant turns that conversation() left out of the loss
        self._prefix = self._bos_prefix()
        self._end_id: int | None = None
        self._ends: list[list[int]] | None = None

    @property
    def pad_id(self) -> int | None:
        return self.tokenizer.pad_token_id

    def normal(self, prompt: list[Message] | str) -> list[Message] | str:
        """The prompt as it is fed: messages in chat mode (text is one user turn), text in raw mode."""
        if self.chat:
            return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return prompt if isinstance(prompt, str) else "\n".join(str(turn["content"]) for turn in prompt)

    def prompt_ids(self, prompt: list[Message] | str) -> Ids:
        """The tokens that generation starts from: one BOS, in chat mode the generation marker at the end."""
        prompt = self.normal(prompt)
        if isinstance(prompt, str):
            return _ids(self._raw_prompt(prompt))
        return _ids(self._render(prompt, marker=True))

    def response_ids(self, prompt: list[Message] | str, response: str, finished: bool) -> Ids:
        """The tokens of a response to this prompt; the end token only where the response finished."""
        prompt = self.normal(prompt)
        if isinstance(prompt, str):
            return self.apart(response, finished)
        head = self._render(prompt, marker=True)
        whole = self._render([*prompt, {"role": ASSISTANT, "content": response}], marker=False)
        if whole[: len(head)] == head:
            body, end = self._to_stop(whole[len(head) :])
            if end is not None and self.tokenizer.decode(body).strip() == response.strip():
                return _ids([*body, end] if finished else body)
        return self.apart(response, finished)

    def apart(self, response: str, finished: bool) -> Ids:
        """The tokens of a response by itself, so that nothing merges across the seam."""
        body, end = self._to_stop(self._bare(response))
        if end is None and finished:
            end = self.end_id
        return _ids(body if end is None else [*body, end])

    def cut(self, prompt_ids: Ids, size: int, side: str) -> Ids:
        """A prompt cut to `size` tokens on the named side; its BOS, and what the template writes behind the
        last message with the generation marker, stay. Raises BadRow where these alone are longer.
        """
        ids, bos = prompt_ids.tolist(), self.tokenizer.bos_token_id
        begin = ids[:1] if bos is not None and ids[0] == bos and ids.count(bos) == 1 else []
        end = next((end for end in self._endings() if end and ids[-len(end) :] == end), [])
        room = size - len(begin) - len(end)
        if room < 0 or (side == "right" and not room):
            fixed = len(begin) + len(end)
            raise BadRow(
                LIMIT_KINDS[0], f"the prompt cannot be cut to {size} tokens: {fixed} are the template's"
            )
        body = ids[len(begin) : len(ids) - len(end)]
        return _ids([*begin, *(body[:room] if side == "right" else body[len(body) - room :]), *end])

    def conversation(self, messages: list[Message], context: int = 0) -> tuple[Ids, Ids, Mask]:
        """Prompt ids, response ids and mask of a chat: every assistant turn, its end token included, is True.

        The first `context` messages are never trained. A turn that the template rewrites once later ones
        follow (dropped "think" text) cannot be trained in place: it stays False and is counted in
        `untrained_turns`.
        """
        turns = [i for i, m in enumerate(messages) if i >= context and m["role"] == ASSISTANT]
        if not turns:
            raise BadRow("no assistant turn", "the messages hold no assistant turn to learn")
        last = turns[-1]
        if not self.chat:
            if len(turns) > 1:
                raise BadRow("no chat template", f"{len(turns)} assistant turns need a chat template")
            response = self.apart(str(messages[last]["content"]), True)
            return self.prompt_ids(messages[:last]), response, np.ones(len(response), dtype=np.bool_)
        ids, spans = self._whole_spans(messages[: last + 1], turns) or self._segment_spans(messages, turns)
        start, stop = spans[0][0], spans[-1][1]
        mask = np.zeros(stop, dtype=np.bool_)
        for begin, end in spans:
            mask[begin:end] = True
        self.untrained_turns["rewritten"] += len(turns) - len(spans)
        return _ids(ids[:start]), _ids(ids[start:stop]), mask[start:]

    def decode_response(self, ids: Ids | Sequence[int], *, keep_special: bool = False) -> str:
        """The text before the first stop id, decoded as a whole; other special tokens only on request."""
        body, _ = self._to_stop([int(i) for i in ids])
        return self.tokenizer.decode(body, skip_special_tokens=not keep_special)

    def decode_prompt(self, ids: Ids) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def end_id(self) -> int:
        """What ends a response: the template's own end of turn, else the EOS, else the lowest stop id."""
        if self._end_id is None:
            self._end_id = self._find_end()
        return self._end_id

    def fingerprint(self) -> str:
        """SHA-256 of what decides ids: vocabulary and rules, template, its use, special and stop ids."""
        return _hash(self.marks())

    def marks(self) -> dict[str, str]:
        """The same in three parts, so that what changed can be named."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            rules: Any = sorted(self.tokenizer.get_vocab().items())  # type: ignore[attr-defined]
        else:
            rules = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # state of calls
        special = [self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]  # PAD decides no id
        return {
            "tokenizer": _hash([rules, special]),
            "chat_template": _hash([self.tokenizer.chat_template, self.chat]),
            "stop_ids": _hash(sorted(self.stop_ids)),
        }

    def _endings(self) -> list[list[int]]:
        """What the template writes behind a user turn, and the generation marker alone; longest first."""
        if not self.chat:
            return []
        if self._ends is None:
            self._ends = []
            with suppress(BadRow):  # a template that refuses the probe says nothing about the end
                asked = [self._render([{"role": "user", "content": text}], marker=True) for text in "ab"]
                same = [one == other for one, other in zip(*(reversed(ids) for ids in asked), strict=False)]
                size = same.index(False) if False in same else 0
                bare = self._render([{"role": "user", "content": "a"}], marker=False)
                self._ends = [asked[0][len(asked[0]) - size :], asked[0][len(bare) :]]
        return self._ends

    def _whole_spans(
        self, messages: list[Message], turns: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]] | None:
        """The chat rendered once, and where its assistant turns lie; None where a turn merges or changes."""
        whole = self._render(messages, marker=False)
        spans = []
        for turn in turns:
            head = self._render(messages[:turn], marker=True)
            upto = self._render(messages[: turn + 1], marker=False)
            body, end = self._to_stop(upto[len(head) :])
            stop = len(head) + len(body) + (end is not None)
            if upto[: len(head)] != head or whole[:stop] != upto[:stop]:
                return None
            if end is None and turn == turns[-1]:
                whole, stop = [*whole[:stop], self.end_id], stop + 1
            spans.append((len(head), stop))
        return whole, spans

    def _segment_spans(
        self, messages: list[Message], turns: list[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The chat cut at its turns as text and tokenised piece by piece; rewritten turns are no piece."""
        whole = self._render_text(messages[: turns[-1] + 1], marker=False)
        ids: list[int] = []
        spans, done = [], ""
        for turn in turns:
            head = self._render_text(messages[:turn], marker=True)
            upto = self._render_text(messages[: turn + 1], marker=False)
            if not (whole.startswith(upto) and upto.startswith(head) and head.startswith(done)):
                continue
            ids += self._bare(head[len(done) :])
            piece = self._bare(upto[len(head) :])
            body, end = self._to_stop(piece)
            if end is None and turn == turns[-1]:
                piece, end = [*piece, self.end_id], self.end_id
            spans.append((len(ids), len(ids) + len(body) + (end is not None)))
            ids, done = ids + piece, upto
        if spans and done == whole:
            return ids, spans
        # Even the last turn is rewritten: its prompt and its own text, apart.
        head_ids = self._render(messages[: turns[-1]], marker=True)
        response = self.apart(str(messages[turns[-1]]["content"]), True).tolist()
        return [*head_ids, *response], [(len(head_ids), len(head_ids) + len(response))]

    def _render(self, messages: list[Message], *, marker: bool) -> list[int]:
        found = self._template(messages, marker=marker, tokenize=True)
        found = found["input_ids"] if isinstance(found, Mapping) else found
        found = found[0] if len(found) and isinstance(found[0], list) else found
        return [int(i) for i in found]

    def _render_text(self, messages: list[Message], *, marker: bool) -> str:
        return str(self._template(messages, marker=marker, tokenize=False))

    def _template(self, messages: list[Message], *, marker: bool, tokenize: bool) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=tokenize, add_generation_prompt=marker
            )
        except Exception as error:  # a template raises whatever it likes
            what = first_line(error)
            raise BadRow(
                "refused by the chat template", f"the chat template refuses the messages ({what})"
            ) from error

    def _bare(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # a vocabulary without an unknown token raises a bare Exception
            raise BadRow(
                "refused by the tokenizer", f"the tokenizer refuses the text ({first_line(error)})"
            ) from error

    def _raw_prompt(self, text: str) -> list[int]:
        bare = self._bare(text)
        return bare if self._prefix and bare[: len(self._prefix)] == self._prefix else [*self._prefix, *bare]

    def _bos_prefix(self) -> list[int]:
        """What the tokenizer puts before a text; an EOS put behind would end the prompt and is left out."""
        around, eos = list(self.tokenizer.encode("")), self.tokenizer.eos_token_id
        alone = len(around) == 1 and self.tokenizer.bos_token_id == eos
        return around[:-1] if around and around[-1] == eos and not alone else around

    def _to_stop(self, ids: list[int]) -> tuple[list[int], int | None]:
        """What precedes the first stop id, and that id."""
        for place, token in enumerate(ids):
            if token in self.stop_ids:
                return ids[:place], token
        return ids, None

    def _find_end(self) -> int:
        eos = self.tokenizer.eos_token_id
        if self.chat:
            with suppress(BadRow):  # a template that refuses the probe says nothing about the end
                head, whole = self._render(_PROBE[:1], marker=True), self._render(_PROBE, marker=False)
                _, end = self._to_stop(whole[len(head) :] if whole[: len(head)] == head else [])
                if end is not None:
                    return end
        return eos if eos is not None and eos in self.stop_ids else min(self.stop_ids)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _ids(values: Sequence[int]) -> Ids:
    return np.asarray(values, dtype=np.int64)


def _vocabulary(tokenizer: Tokenizer) -> int:
    """One more than the highest id: a vocabulary may have holes."""
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return max(len(tokenizer), max(known.values(), default=-1) + 1)
