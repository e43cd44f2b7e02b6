"""A process that is talked to in lines of JSON over its standard input and output, and ends with this one.

Its standard error goes to a file, whose last lines tell why it died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rein.errors import ConfigError, EngineError, shown

GRACE = 10.0  # seconds to end in good order
LAST_LINES, LAST_BYTES = 4, 20_000


class Piped:
    """`words` with this process's id as one more word, or 0 where it cannot tell of this process's end."""

    def __init__(
        self,
        words: Sequence[str],
        where: str,  # the key that names its interpreter
        defaults: Mapping[str, str],  # of the environment
        given: Mapping[str, str],  # in the environment whatever stood there
    ) -> None:
        # The system ends it with the thread that started it: no help where that is not the process's own.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        environment = {**defaults, **os.environ, **given}
        if words[0] != sys.executable:  # these belong to this interpreter
            for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
                environment.pop(name, None)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process may write)
        self.heard = bytearray()
        self.words = ""  # its last, once it has ended
        self.closed = False
        try:
            self.process = subprocess.Popen(
                [*words, str(parent)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                bufsize=0,
                env=environment,
                start_new_session=True,  # signals of the terminal are for this process, which closes it
            )
        except OSError as error:
            self.errors.close()
            raise ConfigError(
                f"{where}: {words[0]} cannot be run ({error.strerror}); name a Python interpreter"
            ) from error

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        rest = memoryview((json.dumps(message) + "\n").encode())
        try:
            while rest:
                rest = rest[self.process.stdin.write(rest) :]
        except (OSError, ValueError):  # it has died, and what it said last is better to know
            return

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """The next message. Raises TimeoutError, and EngineError where it has died."""
        assert self.process.stdout is not None
        until = None if timeout is None else time.monotonic() + timeout
        looked = 0
        while (end := self.heard.find(b"\n", looked)) < 0:
            looked = len(self.heard)
            left = None if until is None else max(until - time.monotonic(), 0)
            if self.closed:
                raise EngineError("rollout.engine: its process is closed; run the stage again")
            if not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            if not some:
                self.close()
                raise EngineError(
                    f"rollout.engine: its process ended with {self._status()}{self.last_words()}; "
                    "run the stage again"
                )
            self.heard += some
        line = bytes(self.heard[:end])
        del self.heard[: end + 1]
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self, grace: float = GRACE) -> None:
        """End it and all that it started, by force what has not ended by itself after `grace` seconds."""
        if self.closed:
            return
        self.closed = True
        self.heard.clear()  # nobody waits for it
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.words = self.last_words()
        self.errors.close()

    def last_words(self) -> str:
        """The end of its standard error, as the rest of a sentence."""
        if self.errors.closed:
            return self.words
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(size - LAST_BYTES, 0))
        lines = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        return "".join(f" | {shown(line.strip(), 200)}" for line in lines[-LAST_LINES:])

    def _status(self) -> str:
        code = self.process.returncode
        return f"exit {code}" if code >= 0 else signal.Signals(-code).name
