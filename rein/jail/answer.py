"""The side of the answer: runs its code, then lets the tests call what it defined. Knows no test."""

import os
import types
from typing import Any

from rein.jail.wire import Link

MODULE = "solution"


def run_program(code: str, given: str) -> None:
    """The code as a program of its own that reads `given` on its standard input."""
    source = os.memfd_create("input")
    with open(os.dup(source), "wb") as file:
        file.write(given.encode("utf-8", "surrogatepass"))
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.close(source)
    exec(compile(code, f"{MODULE}.py", "exec"), _namespace("__main__"))


def serve(code: str, link: Link) -> None:
    """The code as a module whose names the tests may ask for, until they are done."""
    namespace = _namespace(MODULE)
    exec(compile(code, f"{MODULE}.py", "exec"), namespace)
    link.functions["names"] = lambda: _names(namespace)
    link.functions["get"] = lambda name: namespace[name]
    link.ask("ready")
    link.serve()


def _namespace(name: str) -> dict[str, Any]:
    import sys

    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = [f"{MODULE}.py"]
    return module.__dict__


def _names(namespace: dict[str, Any]) -> dict[str, list[str]]:
    """The public names by what they are: modules, exceptions with their bases, everything else."""
    found: dict[str, list[str]] = {}
    for name, value in list(namespace.items()):
        if isinstance(value, types.ModuleType):
            found[name] = ["module", value.__name__]
        elif isinstance(value, type) and issubclass(value, Exception):
            found[name] = ["exception", *(kind.__name__ for kind in value.__mro__)]
        elif not name.startswith("__"):
            found[name] = ["value"]
    return found
