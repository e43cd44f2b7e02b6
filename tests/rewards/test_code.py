"""Claims about code answers: forms of tests, and real hostile programs, each under short limits."""
# ruff: noqa: E501 (programs stand on few lines)

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rein.errors import ConfigError
from rein.jail import walls
from rein.rewards.code import code, extract, plan_of, same_output
from rein.rewards.sandbox import best_level
from rein.types import Trajectory

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MakeRow = Callable[..., Trajectory]
ADD = "def add(a, b):\n    return a + b\n"
CHECK = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
SHORT: dict[str, Any] = {"seconds": 2.5, "cpu_seconds": 1, "memory_mb": 200, "files_mb": 2, "processes": 8}
LEVELS = [walls.NAMESPACES, walls.LIMITS]
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-5, 7) == 2"]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if request.param == walls.NAMESPACES != best_level():
        pytest.skip("this kernel or container allows no namespaces")
    return str(request.param)


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("assert add(1, 2) == 3\nassert add(2, 2) == 4", ADD, "def add(a, b): return 3"),
        (TESTS, ADD, "def add(a, b): return 3"),
        (CHECK, ADD, "def add(a, b): return 4"),
        (json.dumps(CHECK), ADD, "def plus(a, b): return a + b"),
        ({"test_list": TESTS, "test_setup_code": "import math"}, ADD, "def add(a, b): return a - b"),
        ({"inputs": ["1 2\n", "5 6"], "outputs": ["3\n", "11"]}, "print(sum(map(int, input().split())))", "print(3)"),
        ({"inputs": [[1, 2], [2, 3]], "outputs": [3, [5]], "fn_name": "add"}, ADD, "def add(a, b): return [3]"),
        (
            {"inputs": ["[1, 2]\n2"], "outputs": ["[1, 2, 2]"], "fn_name": "push"},
            "class Solution:\n    def push(self, a, b):\n        return (*a, b)",
            "class Solution:\n    def push(self, a, b):\n        return a",
        ),
    ],
)  # fmt: skip
def test_each_form_of_tests_tells_right_from_wrong(row: MakeRow, truth: Any, right: str, wrong: str) -> None:
    rows = [
        row(f"Here it is:\n```python\n{right}\n```\nDone.", truth),
        row(wrong, truth),
        row("no code", truth),
    ]
    assert code(**SHORT)(rows) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "truth", [None, "", "605", "Paris", [], 7, {}, {"inputs": [], "outputs": []}, {"inputs": ["1"]},
              "assert (", {"inputs": [[1]], "outputs": [1, 2], "fn_name": "f"}, [1, 2], {"test": ""}],
)  # fmt: skip
def test_a_row_without_tests_cannot_be_scored(row: MakeRow, truth: Any) -> None:
    assert code(**SHORT)([row(ADD, truth)]) == [None]


def test_the_share_counts_tests_and_all_needs_every_one(row: MakeRow) -> None:
    stdio = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "0", "4"]}
    rows = [
        row("def add(a, b): return 0", TESTS),
        row("def add(a, b):\n    if a < 0:\n        import os; os._exit(0)\n    return a + b", TESTS),
        row("print(input())", stdio),
        row("def add(a, b): return 0", "\n".join(TESTS)),
    ]
    assert code(mode="share", **SHORT)(rows) == [1 / 3, 2 / 3, 3 / 4, 1 / 3]
    assert code(mode="all", **SHORT)(rows) == [0, 0, 0, 0]


HOSTILE = {
    "leaves before the tests": "import sys\ndef add(a, b): return 0\nsys.exit(0)",
    "leaves at once, below Python": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef add(a, b): os._exit(0)",
    "equals everything": "class E:\n    def __eq__(self, o): return True\n    def __bool__(self): return True\n"
    "def add(a, b): return E()",
    "an int that equals everything": "class E(int):\n    def __eq__(self, o): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return E()",
    "computes as it likes": "class E:\n    def __getattr__(self, n): return lambda *a: 0\n"
    "    def __sub__(self, o): return 0\n    def __lt__(self, o): return True\ndef add(a, b): return E()",
    "overrides builtins": "import builtins\nbuiltins.print = builtins.len = builtins.AssertionError = None\n"
    "builtins.__build_class__ = None\ndef add(a, b): return 0",
    "shadows what the tests use": "def abs(x): return 0\ndef all(x): return True\ndef add(a, b): return 0",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "hang": "while True: pass",
    "sleeps": "import time\ntime.sleep(60)",
    "hang when called": "def add(a, b):\n    while True: pass",
    "ignores signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: signal.pause()",
    "memory": "x = 'a' * (1 << 33)",
    "memory, bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef add(a, b): return add(a, b)\nadd(1, 2)",
    "output": "while True: print('a' * 1000000)",
    "a huge value": "def add(a, b): return 'a' * (1 << 26)",
    "a huge file": "with open('x', 'wb') as f:\n    for _ in range(1000): f.write(b'a' * (1 << 20))",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nfor _ in range(10000): threading.Thread(target=time.sleep, args=(60,)).start()",
    "ends its parents": "import os\nfor p in (os.getppid(), 1):\n    try: os.kill(p, 9)\n    except OSError: pass\n"
    "def add(a, b): return 0",
    "writes to every descriptor": "import os\nfor fd in range(64):\n    for word in (b'ppp.', b'{\"value\": true}\\n'):\n"
    "        try: os.write(fd, word)\n        except OSError: pass\ndef add(a, b): return 0",
    "answers by itself": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{\"ask\": \"ready\", \"of\": []}\\n' * 9)\n"
    "    except OSError: pass\nos._exit(0)",
    "looks for expected values": "import gc, sys\ndef add(a, b):\n    frame, seen = sys._getframe(), []\n"
    "    while frame: seen += list(frame.f_locals.values()); frame = frame.f_back\n"
    "    text = repr(seen) + repr([o for o in gc.get_objects() if isinstance(o, (dict, list))])\n"
    "    return 3 if 'assert add' in text else 0",
    "not Python": "def add(a, b) return",
    "null bytes": "def add(a, b): return 3\0",
}  # fmt: skip


def test_a_hostile_answer_costs_its_own_row_and_nothing_else(row: MakeRow, level: str) -> None:
    truth = [*TESTS, "assert abs(add(7, 7) - 14) < 1e-6", "assert all(add(i, 1) == i + 1 for i in range(3))"]
    before = leftovers()
    good = f"{ADD}# fine"
    rows = [row(text, truth) for text in (*HOSTILE.values(), good)]
    scores = code(isolation=level, workers=8, **SHORT)(rows)
    found = dict(zip([*HOSTILE, "good"], scores, strict=True))
    assert found == dict.fromkeys(HOSTILE, 0.0) | {"good": 1.0}
    assert leftovers() == before


def leftovers() -> tuple[set[str], set[str]]:
    """Scratch folders, and processes of this package's sandbox."""
    folders = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rein-code-")}
    processes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"rein.jail.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                processes.add(pid)
        except OSError:
            continue
    return folders, processes


def test_hostile_programs_of_input_and_output_score_nothing(row: MakeRow, level: str) -> None:
    truth = {"inputs": ["1"], "outputs": ["1"]}
    programs = [
        "print(1); import os; os.kill(os.getpid(), 11)",
        "print(1); raise ValueError",
        "print(1)\nwhile True: print('a' * 1000000)",
        "import os, time\nprint(1, flush=True)\nos.close(1)\ntime.sleep(60)",
        "import os\nprint(1, flush=True)\nif os.fork(): os._exit(1)\nwhile True: pass",
        "print(1, end='')\nprint(2)",
    ]
    options = SHORT | {"seconds": 1.5, "isolation": level, "workers": 4}
    assert code(**options)([row(text, truth) for text in programs]) == [0.0] * len(programs)
    assert code(**options)([row("print(input())\nimport sys; sys.exit(0)", truth)]) == [1.0]


def test_nothing_outside_is_reached_from_inside(
    row: MakeRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if best_level() != walls.NAMESPACES:
        pytest.skip("this kernel or container allows no namespaces")
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.setenv("TOKEN", "s3cret")
    probes = {
        "network": "import socket; socket.create_connection(('127.0.0.1', 9), 1)",
        "names": "import socket; socket.gethostbyname('example.com')",
        "file": f"open({str(secret)!r}).read()",
        "written": f"open({str(tmp_path / 'new')!r}, 'w')",
        "library": "import os, json; open(json.__file__, 'a')",
        "root": "open('/x', 'w')",
        "processes": "import os; os.listdir('/proc')",
        "parent": f"import os; os.kill({os.getpid()}, 0)",
        "deleted": f"import os; os.remove({str(secret)!r})",
        "environment": "import os; os.environ['TOKEN']",
        "privilege": "import os; os.setuid(0)",
        "device": "import os; os.mknod('d', 0o60600, 1)",
        "disk": "open('big', 'wb').write(b'a' * (1 << 22))",
    }
    program = "seen = []\n"
    for name, probe in probes.items():
        program += f"try:\n    {probe.replace('; ', chr(10) + '    ')}\n    seen.append({name!r})\nexcept (Exception, SystemExit): pass\n"
    program += "print(seen, len(open('/dev/urandom', 'rb').read(3)))\nopen('mine', 'w').write('a')"
    assert code(**SHORT)([row(program, {"inputs": [""], "outputs": ["[] 3"]})]) == [1.0]
    assert secret.read_text() == "s3cret"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret"]


def test_a_fork_bomb_meets_the_limit_of_processes_and_dies(row: MakeRow) -> None:
    if best_level() != walls.NAMESPACES:
        pytest.skip("this kernel or container allows no namespaces")
    program = (
        "import os, time\nn = 0\nwhile n < 500:\n    try:\n        if os.fork() == 0: time.sleep(60)\n"
        "        n += 1\n    except OSError: break\nprint(n)"
    )
    truth = {"inputs": [""], "outputs": [str(SHORT["processes"] - 1)]}
    assert code(**SHORT)([row(program, truth)]) == [1.0]


WIDE = """
import collections, math
class TooSmall(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return self.items == other.items
def double(values): values[:] = [2 * v for v in values]
def grow(table): table["new"] = {1, 2}
def count(text): return collections.Counter(text)
def squares(n): return (i * i for i in range(n))
def apply(f, x): return f(x) + 1
def root(x):
    if x < 0: raise TooSmall("below", x)
    return math.sqrt(x)
def big(): return 1 << 9000
def nested(): return {"a": [(1, 2.5), {3}], b"k": None, 1j: range(3)}
"""
USES = [
    "values = [1, 2]\ndouble(values)\nassert values == [2, 4]",
    "table = {}\ngrow(table)\nassert table == {'new': {1, 2}}",
    "assert count('aab') == {'a': 2, 'b': 1}",
    "assert list(squares(4)) == [0, 1, 4, 9] and next(squares(2)) == 0",
    "assert apply(lambda x: x * 10, 4) == 41",
    "try:\n    root(-1)\n    assert False\nexcept TooSmall as e:\n    assert e.args == ('below', -1) and isinstance(e, ValueError)",
    "assert math.isclose(root(2), 1.41421356, rel_tol=1e-6)",
    "assert big() == 1 << 9000",
    "assert nested() == {'a': [(1, 2.5), {3}], b'k': None, 1j: range(3)}",
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s.items == [1, 2] and isinstance(s, Stack)",
    "assert Stack().push(1) == Stack().push(1) and Stack() != Stack().push(1)",
    "def test_it():\n    assert root(4) == 2\ntest_it()",
    "import unittest\nclass T(unittest.TestCase):\n    def test_root(self): self.assertEqual(root(9), 3)\n"
    "assert unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T)).wasSuccessful()",
]  # fmt: skip


def test_what_honest_tests_do_works_across_the_wall(row: MakeRow) -> None:
    assert code(mode="share", **SHORT)([row(WIDE, [use]) for use in USES]) == [1.0] * len(USES)
    assert code(**SHORT)([row(WIDE, USES)]) == [1.0]


def test_a_function_may_bear_the_name_of_a_builtin(row: MakeRow) -> None:
    assert code(**SHORT)([row("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"])]) == [1.0]


def test_scores_come_in_the_rows_order_and_equal_rows_run_once(row: MakeRow) -> None:
    truth = {"inputs": [""], "outputs": ["x"]}
    slow = "import time; time.sleep(0.4); print('x')"
    random = "import os; print('x' if os.urandom(1)[0] % 2 else 'y')"
    rows = [row(slow, truth), row("print('y')", truth), row("print('x')", truth), *[row(random, truth)] * 20]
    reward = code(workers=3, **SHORT)
    scores = reward(rows)
    assert scores[:3] == [1.0, 0.0, 1.0]
    assert len(set(scores[3:])) == 1
    assert reward(rows) == scores


def test_ctrl_c_ends_every_program_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import numpy as np\nfrom rein.rewards.code import code\nfrom rein.types import Trajectory\n"
        "ids = np.array([1])\n"
        "rows = [Trajectory('r', 'p', ids, ids, ids > 0, response=f'import time; time.sleep(60 + {i})', "
        "ground_truth=['assert f()']) for i in range(9)]\n"
        "print('begun', flush=True)\ncode(seconds=60, workers=3)(rows)\n"
    )
    before = leftovers()
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    while len(leftovers()[1] - before[1]) < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    process.stdout.close()
    assert leftovers() == before


def test_the_notes_say_which_isolation_is_in_force() -> None:
    assert "network" in code(isolation="auto").notes[0]  # type: ignore[attr-defined]
    assert "container" in code(isolation="limits").notes[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "option",
    [{"mode": "some"}, {"language": "rust"}, {"seconds": 0}, {"workers": 0}, {"memory_mb": -1}, {"isolation": "x"}],
)  # fmt: skip
def test_a_wrong_option_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"reward code: {next(iter(option))}="):
        code(**option)


def test_the_code_is_the_last_block_of_the_language() -> None:
    tags = ("python", "py")
    assert extract("```python\na\n```\n```py\nb\n```\n```bash\nc\n```", tags) == "b\n"
    assert extract("```\na\n```\ntext\n```text\nb\n```", tags) == "a\n"
    assert extract("just code", tags) == "just code"
    assert extract("~~~python\ncut off", tags) == "cut off"
    assert extract("- so:\n  ```python\n  a\n  ```", tags) == "a\n"


def test_output_is_compared_by_words_and_decimals_by_value() -> None:
    assert same_output("1  2 \n3\n", "1 2\n3")
    assert same_output("0.3333333333", "0.33333334")
    assert not same_output("1.0", "1")
    assert not same_output("1\n2", "1 2")
    assert not same_output("nan", "1.0")


def test_only_what_can_fail_is_a_test() -> None:
    plan = plan_of("x = 1\nassert f(x)\nprint(2)\nassert f(2)\nfor i in range(3):\n    assert f(i)")
    assert plan is not None
    assert [counts for _, counts in plan["units"]] == [False, True, False, True, True]
