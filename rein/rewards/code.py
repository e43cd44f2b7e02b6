"""Code answers against the row's own tests: the share passed, or 1 for all and 0 else; None without tests.

The tests are the row's ground truth, in any of these forms (or as JSON text of the last two):

    "assert f(1) == 2\\n..."                                 Python run with the answer's names at hand
    ["assert f(1) == 2", ...]                               each a test
    {"test": "def check(candidate): ...", "entry_point": "f"}          HumanEval; check(f) is called
    {"test_list": [...], "test_setup_code": "..."}                     MBPP
    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                a program's input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}   calls, of a function or Solution's

Asserts and expected values stay in a process of their own, which the answer's code cannot reach; of an
answer's values only plain ones compare (rein/jail/wire.py). Knows nothing of how programs are shut in.
"""

import ast
import hashlib
import json
import os
import re
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

from rein.errors import ConfigError
from rein.jail import tests, walls
from rein.protocols import Reward
from rein.rewards.sandbox import WORDS, Limits, Sandbox, best_level
from rein.types import Trajectory

_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE
)
_TAGS = {"python": ("python", "py", "python3")}
_SAME_DECIMAL = 1e-6
Plan = dict[str, Any]


def code(
    *,
    mode: str = "all",
    language: str = "python",
    seconds: float = 10.0,
    cpu_seconds: int = 10,
    memory_mb: int = 1024,
    output_kb: int = 1024,
    files_mb: int = 16,
    processes: int = 16,
    workers: int | None = None,
    isolation: str = "auto",
) -> Reward:
    """mode `all`: 1 where every test passes, else 0; `share`: the share that passes.

    The code is the answer's last fenced block in `language` (or without one), else the whole answer. The
    limits hold for one run: an answer with all its asserts or calls, or with one input. `workers`: answers
    tested at once, default the cores. isolation `auto` takes the best the kernel allows; `namespaces` or
    `limits` insist.
    """
    if mode not in ("all", "share"):
        raise ConfigError(f"reward code: mode={mode!r}; give all or share")
    if language not in _TAGS:
        raise ConfigError(f"reward code: language={language!r} cannot be run; give {', '.join(_TAGS)}")
    if isolation not in ("auto", *WORDS):
        raise ConfigError(f"reward code: isolation={isolation!r}; give auto, {' or '.join(WORDS)}")
    given = {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "memory_mb": memory_mb, "output_kb": output_kb,
        "files_mb": files_mb, "processes": processes, "workers": 1 if workers is None else workers,
    }  # fmt: skip
    for name, value in given.items():
        if not value > 0:
            raise ConfigError(f"reward code: {name}={value}; give a number above 0")
    limits = Limits(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        memory=memory_mb << 20,
        output=output_kb << 10,
        files=files_mb << 20,
        processes=processes,
    )
    return CodeReward(limits, isolation, _TAGS[language], workers or os.cpu_count() or 1, mode == "share")


class CodeReward:
    """Implements protocols.Reward. `notes` say which isolation is in force."""

    def __init__(
        self, limits: Limits, isolation: str, tags: Sequence[str], workers: int, share: bool
    ) -> None:
        self._limits, self._isolation = limits, isolation
        self._tags, self._workers, self._share = tags, workers, share
        self._sandbox: Sandbox | None = None
        self._known: dict[bytes, float | None] = {}
        self._lock = threading.Lock()

    @property
    def notes(self) -> list[str]:
        return [f"reward code: {WORDS[self._opened().level]}"]

    def __call__(self, rows: Sequence[Trajectory]) -> list[float | None]:
        """Equal answers to equal tests are run once. Ends every program when interrupted."""
        keys = [_key(row) for row in rows]
        todo = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        if todo:
            sandbox = self._opened()
            with ThreadPoolExecutor(min(self._workers, len(todo))) as pool:
                try:
                    self._known |= zip(todo, pool.map(self._score, todo.values()), strict=True)
                except BaseException:
                    sandbox.stop()
                    pool.shutdown(cancel_futures=True)
                    sandbox.resume()
                    raise
        return [self._known[key] for key in keys]

    def _opened(self) -> Sandbox:
        with self._lock:
            if self._sandbox is None:
                best = best_level() if self._isolation != walls.LIMITS else walls.LIMITS
                if self._isolation == walls.NAMESPACES != best:
                    raise ConfigError(
                        "reward code: isolation=namespaces, but this kernel or container allows none; "
                        "allow user namespaces, or write auto"
                    )
                self._sandbox = Sandbox(self._limits, best)
            return self._sandbox

    def _score(self, row: Trajectory) -> float | None:
        plan = plan_of(row.ground_truth)
        if plan is None:
            return None
        source, sandbox = extract(row.response, self._tags), self._opened()
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return 0.0
        plan["stop"] = not self._share
        if "units" in plan or "fn_name" in plan:
            report = sandbox.run_tests(source, plan)
            total = len(plan["inputs"]) if "inputs" in plan else sum(counts for _, counts in plan["units"])
            passed = report.count(tests.PASSED)
        else:
            passed, total = self._printed(sandbox, source, plan), len(plan["inputs"])
        return passed / total if self._share else float(passed == total)

    def _printed(self, sandbox: Sandbox, source: str, plan: Plan) -> int:
        """How many inputs give the output wanted; none is tried after the first failure with mode `all`, or
        after a run out of time.
        """
        passed, limits = 0, sandbox.limits
        for given, wanted in zip(plan["inputs"], plan["outputs"], strict=True):
            started = time.monotonic()
            printed = sandbox.run_program(source, given)
            right = printed is not None and same_output(printed, wanted)
            passed += right
            spent = time.monotonic() - started
            if not right and (plan["stop"] or spent >= min(limits.seconds, limits.cpu_seconds)):
                break
        return passed


def _key(row: Trajectory) -> bytes:
    text = json.dumps([row.response, row.ground_truth], default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def extract(answer: str, tags: Sequence[str]) -> str:
    """The last fenced block with one of the tags, else the last without a tag, else the whole answer.

    A block that never closes goes to the end.
    """
    blocks = [(match[2].lower(), match[3]) for match in _FENCE.finditer(answer)]
    for wanted in (tags, ("",)):
        found = [body for tag, body in blocks if tag in wanted]
        if found:
            return textwrap.dedent(found[-1])
    return answer


def plan_of(truth: Any) -> Plan | None:
    """What is run for a ground truth: `units` of test code, or inputs and outputs; None for no tests."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):  # Python that begins so
            truth = json.loads(truth)
    if isinstance(truth, Mapping):
        if "inputs" in truth:
            return _pairs(truth)
        setup = "\n".join([*_texts(truth.get("test_imports")), *_texts(truth.get("test_setup_code"))])
        return _units(truth.get("test", truth.get("test_list")), setup, truth.get("entry_point"))
    return _units(truth, "", None)


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [] if value is None else [str(each) for each in value]


def _units(given: Any, setup: str, entry: Any) -> Plan | None:
    """Test code in pieces: [source, whether passing it counts]."""
    if not isinstance(given, str | Sequence) or not all(isinstance(each, str) for each in given):
        return None
    try:
        units = _split(given) if isinstance(given, str) else [[each, True] for each in given if _tests(each)]
        if isinstance(entry, str) and entry:
            whole = given if isinstance(given, str) else "\n".join(given)
            units = [[f"{whole}\n\ncheck({entry})", True]] if "def check" in whole else units
        for source, _ in [*units, [setup, False]]:
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not units:
        return None
    plan: Plan = {"units": [[setup, False], *units] if setup.strip() else units}
    return plan | ({"entry_point": entry} if isinstance(entry, str) and entry else {})


def _split(source: str) -> list[list[Any]]:
    """Each assert at the top is a test with what stands before it; what follows the last may be one too."""
    nodes = ast.parse(source).body if _tests(source) else []
    units = [[ast.unparse(node), isinstance(node, ast.Assert)] for node in nodes]
    if units and (not any(counts for _, counts in units) or _tests(str(units[-1][0]))):
        units[-1][1] = True
    return units


def _tests(source: str) -> bool:
    """Whether the code can fail on purpose: "605" is Python too, but tests nothing."""
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(ast.parse(source)))


def _pairs(truth: Mapping[str, Any]) -> Plan | None:
    """Inputs and outputs, of a program as text, of calls as lists of arguments and values."""
    inputs, outputs, name = truth["inputs"], truth.get("outputs"), truth.get("fn_name")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        return None
    if not name:
        return {"inputs": [_lines(each) for each in inputs], "outputs": [_lines(each) for each in outputs]}
    try:
        given = [_arguments(each) for each in inputs]
        as_json = isinstance(inputs[0], str)
        wanted = [json.loads(each) if as_json and isinstance(each, str) else each for each in outputs]
    except ValueError:
        return None
    return {"fn_name": str(name), "inputs": given, "outputs": wanted}


def _lines(value: Any) -> str:
    return "\n".join(str(each) for each in value) if isinstance(value, list) else str(value)


def _arguments(given: Any) -> list[Any]:
    """The arguments of a call: a list of them, or text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return list(given) if isinstance(given, list | tuple) else [given]


def same_output(printed: str, wanted: str) -> bool:
    """Equal but for white space at the ends of lines; a wanted decimal number may be off by one millionth."""
    one, other = ([line.split() for line in text.strip().splitlines()] for text in (printed, wanted))
    if one == other:
        return True
    if [len(line) for line in one] != [len(line) for line in other]:
        return False
    return all(map(_same_word, chain.from_iterable(one), chain.from_iterable(other)))


def _same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    try:
        number, near = float(said), float(wanted)
    except ValueError:
        return False
    return "." in wanted and abs(number - near) <= _SAME_DECIMAL * max(1.0, abs(near))
