"""Answers from any OpenAI-compatible completions endpoint that returns log-probs: vLLM, SGLang, llama.cpp.

One request an answer, many under way at once. Prompts go as token ids; the ways of the servers to switch off
what would change the distribution, and to be told token ids, are all sent, for each leaves out what it does
not know. Whether the log-probs are those at the sampling temperature is not known here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from rein.engines.board import Ask
from rein.engines.choices import Choices
from rein.engines.http_json import Client, Closed
from rein.errors import ConfigError, EngineError
from rein.protocols import Tokenizer
from rein.types import Completion, Prompt

WHERE = "rollout.server"
WHOLE: dict[str, Any] = {  # the distribution as the model gives it
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,  # llama.cpp
    "samplers": ["temperature", "top_p"],  # llama.cpp cuts before it scales, unless told
}
TOLD: dict[str, Any] = {  # every token with its id and log-prob, the one that ends an answer too
    "logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "no_stop_trim": True,  # SGLang
}
Result = tuple[Ask, "Completion | BaseException"]


class ServerEngine:
    """Implements protocols.RolloutEngine. Raises ConfigError for what is no http(s) URL."""

    def __init__(
        self,
        url: str | None,  # with its version part: http://localhost:8000/v1
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        *,
        vocabulary: int,
        context: int,  # the longest prompt with its answer, in tokens
        model: str | None = None,  # default: the first that the server lists
        key: str | None = None,
        concurrency: int = 16,
        timeout: float = 600.0,
        retries: int = 8,
        stop_texts: Sequence[str] = (),
    ) -> None:
        if not url or not url.startswith(("http://", "https://")):
            said = f"{url!r} is no http or https URL" if url else "is not given"
            raise ConfigError(f"{WHERE}.url: {said}; write the server's, such as http://localhost:8000/v1")
        self.client = Client(
            url, key=key, concurrency=concurrency, timeout=timeout, retries=retries, where=WHERE
        )
        self.choices = Choices(tokenizer, stop_ids, stop_texts, vocabulary=vocabulary, where=WHERE)
        self.stop_ids, self.stop_texts = sorted(stop_ids), list(stop_texts)
        self.model, self.context = model, context
        self._asked, self._keeps_stops = False, True

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Callable[[int], None] | None = None,
        places: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """n completions for each prompt, in the prompts' order; each has a seed of its own.

        Raises EngineError when a prompt leaves no room, for what the server refuses or lacks, and when it
        does not answer.
        """
        self.client.open()
        self._ask_model()
        asks: SimpleQueue[Ask] = SimpleQueue()
        for i, prompt in enumerate(prompts):
            room, place = self._room(prompt, max_new_tokens), i if places is None else places[i]
            for sample in range(n):
                asks.put(Ask(i, sample, prompt.prompt_ids, room, place))
        common = {"temperature": temperature, "top_p": top_p, "stream": False, "n": 1}
        results: SimpleQueue[Result] = SimpleQueue()
        for _ in range(min(self.client.gate.most, len(prompts) * n)):
            threading.Thread(target=self._work, args=(asks, results, common, seed), daemon=True).start()
        answers: list[list[Any]] = [[None] * n for _ in prompts]
        done: Counter[int] = Counter()
        try:
            for _ in range(len(prompts) * n):
                ask, found = results.get()
                if isinstance(found, BaseException):
                    raise found
                answers[ask.prompt][ask.sample] = found
                done[ask.prompt] += 1
                if advance is not None and done[ask.prompt] == n:
                    advance(1)
        finally:
            self.client.gate.close()  # whatever is still under way is not waited for
        return answers

    def _work(
        self, asks: SimpleQueue[Ask], results: SimpleQueue[Result], common: dict[str, Any], seed: int
    ) -> None:
        """One thread: answers until none is asked for."""
        while True:
            try:
                ask = asks.get_nowait()
            except Empty:
                return
            try:
                results.put((ask, self._answer(ask, common, seed)))
            except Closed:
                return
            except BaseException as error:
                results.put((ask, error))
                return

    def _answer(self, ask: Ask, common: dict[str, Any], seed: int) -> Completion:
        place = ask.prompt if ask.place is None else ask.place
        body = common | WHOLE | TOLD | {
            "model": self.model,
            "prompt": ask.prompt_ids.tolist(),
            "max_tokens": ask.room,
            "seed": int(np.random.default_rng([seed, place, ask.sample]).integers(2**31 - 1)),
            "stop_token_ids": self.stop_ids,
        }  # fmt: skip
        if self.stop_texts and self._keeps_stops:
            found = self._read(body | {"stop": self.stop_texts}, ask.room)
            if found is not None:
                return found
            self._keeps_stops = False  # stop texts are looked for here, once the answer is whole
        whole = self._read(body, ask.room)
        assert whole is not None
        return whole

    def _read(self, body: dict[str, Any], room: int) -> Completion | None:
        answer = self.client.ask("/completions", body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices or not isinstance(choices[0], dict):
            raise EngineError(f"{WHERE}: the server's answer has no choices; is {self.client.url} its API?")
        return self.choices.read(choices[0], room, texts_sent="stop" in body)

    def _ask_model(self) -> None:
        """Which model is served, and how long its rows may get, where the server says so."""
        if self._asked:
            return
        answer = self.client.ask("/models")
        listed = answer.get("data") if isinstance(answer, dict) else None
        models = [entry for entry in listed or [] if isinstance(entry, dict) and "id" in entry]
        if self.model is None:
            if not models:
                raise EngineError(f"{WHERE}: the server lists no model; name it by {WHERE}.model")
            self.model = str(models[0]["id"])
        for entry in models:
            longest = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")  # vLLM, llama.cpp
            if entry["id"] == self.model and isinstance(longest, int):
                self.context = min(self.context, longest)
        self._asked = True

    def _room(self, prompt: Prompt, max_new_tokens: int) -> int:
        room = min(max_new_tokens, self.context - len(prompt.prompt_ids))
        if room < 1:
            raise EngineError(
                f"{prompt.where}: prompt of {len(prompt.prompt_ids)} tokens fills the context of "
                f"{self.context} that is served; set data.max_prompt_length lower"
            )
        return room
