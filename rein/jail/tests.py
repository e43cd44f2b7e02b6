"""The side of the tests: runs them against what the answer's process lends, and reports each that passes.

Asserts, expected values and the report live in this process only: the answer's code sees the arguments of
its calls and nothing else. A test that would read a builtin or a standard module by its name gets the real
one, whatever the answer calls so, unless the test names nothing else.
"""

import ast
import builtins
import importlib
import math
import os
import sys
from typing import Any

from rein.jail.wire import Link

PASSED, FAILED, ENDED = b"p", b"f", b"."


def run(plan: dict[str, Any], link: Link, report: int) -> None:
    """Write PASSED or FAILED for each test of the plan in order, and ENDED."""
    ready: list[bool] = []
    link.functions["ready"] = lambda: ready.append(True)
    link._answer(link._receive())
    if not ready:
        return
    tests = _calls(plan, link) if "fn_name" in plan else _sources(plan, link)
    for test in tests:
        passed = False
        try:
            passed = test()
        except BaseException:  # whatever a test raises, it has not passed
            passed = False
        passed = passed and not link.lost
        os.write(report, PASSED if passed else FAILED)
        if link.lost or (not passed and plan["stop"]):
            return
    os.write(report, ENDED)


def _sources(plan: dict[str, Any], link: Link) -> list[Any]:
    """One function for each of the plan's `units`, [source, whether it counts]; they share a namespace."""
    units = [(ast.parse(source), counts) for source, counts in plan["units"]]
    namespace: dict[str, Any] = {"__name__": "tests"}
    namespace |= _lent(plan.get("entry_point"), [tree for tree, _ in units], link)
    tests, before = [], list[ast.Module]()
    for tree, counts in units:
        before.append(tree)
        if counts:
            tests.append(_runner(before, namespace))
            before = []
    return tests


def _runner(trees: list[ast.Module], namespace: dict[str, Any]) -> Any:
    def test() -> bool:
        for tree in trees:
            exec(compile(tree, "tests.py", "exec"), namespace)
        return True

    return test


def _lent(entry: str | None, trees: list[ast.Module], link: Link) -> dict[str, Any]:
    """What the tests find under the names that the answer defined and they read."""
    read, called, stored = set[str](), set[str](), set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    python = set(dir(builtins))
    names = link.ask("names")
    own = read - stored - python
    found: dict[str, Any] = {}
    for name in read if own or entry else called:
        if name in python and name != entry and (own or entry):
            continue
        kind, *more = names.get(name, ["none"])
        if name in sys.stdlib_module_names and name not in called and name != entry:
            found[name] = importlib.import_module(name)
        elif kind == "module" and more[0].partition(".")[0] in sys.stdlib_module_names:
            found[name] = importlib.import_module(more[0])
        elif kind == "exception":
            found[name] = link.exception(more[0], more)
        elif kind == "value":
            found[name] = link.ask("get", name)
    return found


def _calls(plan: dict[str, Any], link: Link) -> list[Any]:
    """One function for each pair of inputs and outputs."""
    names, name = link.ask("names"), plan["fn_name"]
    if name in names:
        function = link.ask("get", name)
    elif "Solution" in names:
        function = getattr(link.ask("get", "Solution")(), name)
    else:
        raise NameError(name)

    def test(given: list[Any], wanted: Any) -> bool:
        value, wanted = _listed(function(*given)), _listed(wanted)
        alone = isinstance(wanted, list) and len(wanted) == 1  # APPS wraps the value so
        return _same(value, wanted) or (alone and _same(value, wanted[0]))

    pairs = zip(plan["inputs"], plan["outputs"], strict=True)
    return [lambda given=given, wanted=wanted: test(given, wanted) for given, wanted in pairs]


def _listed(value: Any) -> Any:
    """Tuples as lists and keys as text, at every depth, as JSON has them."""
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _listed(item) for key, item in value.items()}
    return value


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and type(value) in (int, float):
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(wanted, list) and isinstance(value, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(wanted, dict) and isinstance(value, dict):
        return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in wanted)
    return type(value) is type(wanted) and bool(value == wanted)
