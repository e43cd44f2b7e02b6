"""Are two mathematical answers the same? Asked of math-verify in a process of its own.

Two texts in, True or False out. SymPy can hang inside one C call (9^9^9^9), where no Python signal handler
runs, and math-verify's own alarm works in the main thread only and takes SIGALRM from everybody else. So
the helper process sets itself an alarm that the kernel acts on: when it dies, the answer counts as wrong
and the next question starts a new helper. Works from any thread. Knows nothing of rewards.
"""

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rein.errors import ReinError

SECONDS = 5.0  # of the helper's CPU time, so that a busy machine changes no score
MEMORY = 4 << 30  # bytes of address space for the helper
LONGEST = 4000  # characters of an answer that are read
_PACKAGE = str(Path(__file__).resolve().parents[2])
_START = """
import sys
sys.path.insert(0, sys.argv[1])
from rein.rewards.checker import serve
serve(float(sys.argv[2]))
"""


class Checker:
    """Asks the helper and remembers what it said. `timeouts` counts questions that the helper did not
    survive.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.timeouts = 0
        self._known: dict[tuple[str, str], bool] = {}
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[str] | None = None
        self._stop: Callable[[], object] | None = None

    def equal(self, answer: str, truth: str) -> bool:
        """Whether `answer` (LaTeX in \\boxed{} or $...$, or plain text) holds the value of `truth`."""
        key = (answer[-LONGEST:], truth)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._ask(*key)
            return self._known[key]

    def _ask(self, answer: str, truth: str) -> bool:
        if self._helper is None:
            self._helper = self._start()
        helper = self._helper
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            helper.stdin.write(json.dumps([answer, truth]) + "\n")
            helper.stdin.flush()
            reply = helper.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            self.timeouts += 1
            self._helper = None
            if self._stop is not None:
                self._stop()
        return reply == "yes\n"

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-c", _START, _PACKAGE, str(self.seconds)]
        helper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        assert helper.stdout is not None
        if helper.stdout.readline() != "ready\n":
            _stop(helper)
            raise ReinError(
                "reward math: math-verify does not start; run `python -c 'import math_verify'` to see why"
            )
        self._stop = weakref.finalize(self, _stop, helper)
        return helper


def _stop(helper: subprocess.Popen[str]) -> None:
    helper.kill()
    helper.wait()
    for pipe in (helper.stdin, helper.stdout):
        if pipe is not None and not pipe.closed:
            with suppress(BrokenPipeError):  # what was not yet written has no reader any more
                pipe.close()


def serve(seconds: float) -> None:
    """The helper's life: a question per line in, yes or no out, until stdin ends or a question takes too
    long.
    """
    import logging
    import resource
    import signal

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process, whatever Python is doing
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not answer for us
    from math_verify import parse, verify

    verify(parse("$1$", parsing_timeout=None), parse("$1$", parsing_timeout=None), timeout_seconds=None)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        answer, truth = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            gold = parse(truth, parsing_timeout=None)
            same = bool(gold) and verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None)
        except Exception:  # whatever SymPy trips over: no proof that the two are the same
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("yes" if same else "no", file=replies, flush=True)
