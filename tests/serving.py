"""A completions server here: a tiny model behind HTTP, with the manners and faults of real ones."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from rows_made import prompts, row

from rein.engines.hf import HfEngine
from rein.functional.calibration import other_kinds
from rein.models.actor import Actor
from rein.types import Completion


@dataclass
class Manner:
    """How the server answers; numbers count the answers so far, or requests."""

    ids: str = "token_ids"  # vLLM, SGLang; "content": llama.cpp; "numbered", "texts": in logprobs.tokens
    kind: str = "processed"  # of log-probs; raw, cut
    trims: bool = False  # leaves the tokens of a stop text out
    own_stops: tuple[int, ...] = ()  # ends answers there too, whatever is asked
    keeps_stop: bool = True  # the stop token is among the tokens
    short: bool = False  # one log-prob less
    no_log_probs: bool = False
    most: int = 10**9  # requests at once; another one is refused
    after: str | None = None  # Retry-After of such a refusal
    refuse: dict[int, tuple[int, str]] = field(default_factory=dict)  # request -> status, body
    cuts: tuple[int, ...] = ()  # requests whose answer breaks off in the middle
    garbles: tuple[int, ...] = ()  # requests answered with what is no JSON
    slow: dict[int, float] = field(default_factory=dict)  # request -> seconds
    every: float = 0.0  # seconds of every answer
    dies_after: int | None = None  # answers; from then on every connection is dropped


class Server(http.server.ThreadingHTTPServer):
    """What it saw: bodies, headers, and how many requests were under way at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, actor: Actor, manner: Manner) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.actor, self.manner = actor, manner
        self.lock, self.model = threading.Lock(), threading.Lock()
        self.requests, self.under_way, self.most_seen, self.refused, self.answered = 0, 0, 0, 0, 0
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, json.dumps({"object": "list", "data": [{"id": "tiny", "max_model_len": 256}]}))

    def do_POST(self) -> None:
        server, manner = self.server, self.server.manner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = server.requests
            server.requests += 1
            server.under_way += 1
            server.most_seen = max(server.most_seen, server.under_way)
            busy = server.under_way > manner.most
            server.refused += busy
            server.bodies.append(body)
            server.times.append(time.monotonic())
            server.keys.append(self.headers.get("Authorization"))
            dead = manner.dies_after is not None and server.answered >= manner.dies_after
        status, text, headers = (0, "", {}) if dead else self._answer(number, body, busy)
        with server.lock:
            server.under_way -= 1
        self.close_connection = True
        if not dead:
            self._send(status, text, headers, cut=number in manner.cuts)

    def _answer(self, number: int, body: dict[str, Any], busy: bool) -> tuple[int, str, dict[str, str]]:
        server, manner = self.server, self.server.manner
        time.sleep(manner.slow.get(number, manner.every))
        if busy:
            return 429, '{"error": "too many"}', {"Retry-After": manner.after} if manner.after else {}
        if number in manner.refuse:
            return *manner.refuse[number], {}
        if number in manner.garbles:
            return 200, "<html>a proxy of another's</html>", {}
        with server.model:
            text = json.dumps({"choices": [choice(server.actor, body, manner)]})
        with server.lock:
            server.answered += 1
        return 200, text, {}

    def _send(
        self, status: int, text: str, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        data = text.encode()
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
        except OSError:  # the client waited no longer
            pass

    def log_message(self, *given: Any) -> None:
        pass


def choice(actor: Actor, body: dict[str, Any], manner: Manner) -> dict[str, Any]:
    """One answer of the model, said in the server's manner."""
    stops = [*body["stop_token_ids"], *manner.own_stops]
    texts = body.get("stop") or []
    engine = HfEngine(actor.model, actor.tokenizer, stops, stop_texts=texts)
    ((found,),) = engine.generate(
        prompts([body["prompt"]]),
        n=1,
        temperature=body["temperature"],
        top_p=body["top_p"],
        max_new_tokens=body["max_tokens"],
        seed=body["seed"],
    )
    ids, log_probs = found.response_ids.tolist(), _stated(actor, body, found, manner.kind)
    if found.finish_reason == "stop":
        if ids[-1] in stops:
            drop = 0 if manner.keeps_stop else 1
        else:
            last = next(text for text in texts if text in actor.tokenizer.decode(ids))
            drop = len(last) if manner.trims else 0
        ids, log_probs = ids[: len(ids) - drop], log_probs[: len(ids) - drop]
    if not ids:  # as llama.cpp
        return {"index": 0, "finish_reason": found.finish_reason, "text": ""}
    said: dict[str, Any] = {
        "index": 0,
        "finish_reason": found.finish_reason,
        "text": actor.tokenizer.decode([i for i in ids if i not in stops]),
        "logprobs": _log_probs(actor, ids, log_probs, manner),
    }
    return said | ({"token_ids": ids} if manner.ids == "token_ids" else {})


def _log_probs(actor: Actor, ids: list[int], log_probs: list[float], manner: Manner) -> Any:
    if manner.no_log_probs:
        return None
    texts = [actor.tokenizer.decode([i]) for i in ids]
    log_probs = log_probs[: len(ids) - 1] if manner.short else log_probs
    if manner.ids == "content":
        return {
            "content": [
                {"id": i, "token": text, "logprob": p}
                for i, text, p in zip(ids, texts, log_probs, strict=False)
            ]
        }
    tokens = [f"token_id:{i}" for i in ids] if manner.ids == "numbered" else texts
    return {"tokens": tokens, "token_logprobs": log_probs}


def _stated(actor: Actor, body: dict[str, Any], found: Completion, kind: str) -> list[float]:
    temperature = body["temperature"]
    if kind == "processed" or temperature == 0:
        return [float(p) for p in found.log_probs]
    rows = [row(body["prompt"], found.response_ids.tolist())]
    compute = partial(other_kinds, top_p=body["top_p"])
    stated = actor.over_logits(rows, torch.tensor([temperature]), compute)
    return np.asarray(stated[0 if kind == "raw" else 1, 0].tolist()).tolist()


@contextmanager
def serving(actor: Actor, manner: Manner | None = None) -> Iterator[Server]:
    server, before = Server(actor, manner or Manner()), set(threading.enumerate())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for late in set(threading.enumerate()) - before:  # what still decodes would count with the next test
            late.join(10)
