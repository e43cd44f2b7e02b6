"""Look a name up in a table of variants, or import the user's `"pkg.mod:name"`."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rein.errors import ConfigError


def nearest(word: str, known: Iterable[str]) -> str:
    """The words to append to an error: the closest known name, else all of them."""
    names = [str(name) for name in known]
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def lookup(table: Mapping[str, Any], name: str, where: str) -> Any:
    """The entry called `name`, or the object that `"pkg.mod:name"` names.

    Raises ConfigError when neither exists; `where` is the recipe key that gave the name.
    """
    if name in table:
        return table[name]
    if ":" in name:
        return load_object(name, where)
    raise ConfigError(f"{where}: {name!r} is unknown; {nearest(name, table)}")


def load_object(spec: str, where: str) -> Callable[..., Any]:
    """Import `"pkg.mod:name"`; the current folder counts as a place to import from."""
    module_name, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where}: cannot import {module_name!r} ({error}); check the name and PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ConfigError(
            f"{where}: {module_name} has no function {attribute!r}; {nearest(attribute, functions)}"
        )
    result: Callable[..., Any] = found
    return result
