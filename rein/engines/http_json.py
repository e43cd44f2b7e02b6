"""JSON over HTTP to a server that may be busy, slow, or away for a while.

A refusal for being busy (429, 503) halves the requests under way, and `Retry-After` holds all of them; each
answer lets them grow again. What may pass (a lost connection, no answer in time, 5xx) is asked again, after a
longer wait each time; any other refusal is an error at once, in the server's words. Knows nothing of what is
asked.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from rein.errors import EngineError, shown

BUSY = (429, 503)
PASSING = (408, 425)  # and 5xx
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a request is asked again
LONGEST_HOLD = 600.0  # seconds of Retry-After that are believed
WORDS = 400  # characters of what a server says that are shown


class Closed(Exception):
    """No more requests: another one failed for good."""


class Failure(NamedTuple):
    """Why a request got no answer this time."""

    why: str
    busy: bool = False
    hold: float = 0.0  # seconds that the server wants to be left alone


class Gate:
    """Lets at most `allowed` requests through at once."""

    def __init__(self, most: int, allowed: float) -> None:
        self.most, self.allowed = most, allowed
        self.under_way, self.answered = 0, 0
        self.opens, self.closed = 0.0, False
        self.changed = threading.Condition()

    @contextmanager
    def through(self) -> Iterator[None]:
        """Inside, one more request is under way. Raises Closed."""
        with self.changed:
            while not self.closed and (
                self.under_way >= int(self.allowed) or (held := self.opens - time.monotonic()) > 0
            ):
                full = self.under_way >= int(self.allowed)
                self.changed.wait(None if full else held)
            if self.closed:
                raise Closed
            self.under_way += 1
        try:
            yield
        finally:
            with self.changed:
                self.under_way -= 1
                self.changed.notify_all()

    def answer(self) -> None:
        """A request got its answer."""
        with self.changed:
            self.answered += 1
            self.allowed = min(self.allowed + 1 / self.allowed, self.most)
            self.changed.notify_all()

    def refuse(self, hold: float) -> None:
        """The server is busy: half as many at once, none before it says so."""
        with self.changed:
            self.allowed = max(self.allowed / 2, 1.0)
            self.opens = max(self.opens, time.monotonic() + hold)

    def wait(self, seconds: float) -> None:
        """Raises Closed."""
        with self.changed:
            if self.changed.wait_for(lambda: self.closed, seconds):
                raise Closed

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _Stays(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like other refusals: the key and the prompt go to the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_Stays)


class Client:
    """One server. `where` is the recipe's section, for messages."""

    def __init__(
        self, url: str, *, key: str | None, concurrency: int, timeout: float, retries: int, where: str
    ) -> None:
        self.url, self.timeout, self.retries, self.where = url.rstrip("/"), timeout, retries, where
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.gate = Gate(concurrency, float(concurrency))

    def open(self) -> None:
        """Begin anew, with as many requests at once as went before."""
        self.gate = Gate(self.gate.most, self.gate.allowed)

    def ask(self, path: str, body: Any = None) -> Any:
        """The server's answer to a GET, or to a POST of `body`.

        Raises EngineError for a refusal, and when nothing came after all tries; Closed.
        """
        gate, tries = self.gate, 0
        while True:
            answered = gate.answered
            with gate.through():
                found = self._once(path, body)
            if not isinstance(found, Failure):
                gate.answer()
                return found
            if found.busy:
                gate.refuse(found.hold)
                tries = 0 if gate.answered > answered else tries  # others got through: it is only busy
            tries += 1
            if tries > self.retries:
                tried = f"tried {tries} times" if tries > 1 else "tried once"
                raise EngineError(
                    f"{self.where}: {self.url}{path} {found.why}, {tried}; start the server again, or raise "
                    f"{self.where}.retries or timeout"
                )
            gate.wait(min(FIRST_WAIT * 2 ** (tries - 1), LONGEST_WAIT))

    def _once(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            with OPENER.open(request, timeout=self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(error, path)
        except TimeoutError:
            return Failure(f"gave no answer in {self.timeout:g} seconds")
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                return Failure(f"gave no answer in {self.timeout:g} seconds")
            return Failure(f"cannot be asked ({shown(str(reason) or type(reason).__name__)})")
        try:
            return json.loads(text)
        except ValueError:
            return Failure(f"answered with what is no JSON ({shown(text[:80].decode(errors='replace'))!r})")

    def _refused(self, error: urllib.error.HTTPError, path: str) -> Failure:
        """Raises EngineError where asking again would not help."""
        try:
            words = _words(error.read())
        except (http.client.HTTPException, OSError):
            words = "no words"
        said = f"refused with HTTP {error.code} ({words})"
        if error.code in BUSY:
            return Failure(said, True, _hold(error.headers.get("Retry-After")))
        if error.code in PASSING or error.code >= 500:
            return Failure(said)
        todo = {401: "give its key by api_key_env", 403: "give its key by api_key_env", 404: "check its url"}
        what = todo.get(error.code, "correct what it does not take")
        raise EngineError(f"{self.where}: {self.url}{path} {said}; {what}")


def _words(body: bytes) -> str:
    """What the server says, without its wrapping."""
    found: Any = body.decode(errors="replace").strip()
    with suppress(ValueError):
        found = json.loads(found)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return shown(found if isinstance(found, str) else json.dumps(found), WORDS) or "no words"


def _hold(after: str | None) -> float:
    """Seconds of a Retry-After: a number or a date (RFC 9110, section 10.2.3); 0 for none or nonsense."""
    if not after:
        return 0.0
    seconds = 0.0
    try:
        seconds = float(after)
    except ValueError:
        with suppress(ValueError, TypeError):
            seconds = email.utils.parsedate_to_datetime(after).timestamp() - time.time()
    return min(max(seconds, 0.0), LONGEST_HOLD) if seconds == seconds else 0.0
