"""`rein ui [DIR]`: local pages over all runs in a folder, live: curves, guards, rows token by token.

Reads what runs write while they write it, and changes nothing. On this machine alone unless --host is given.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from rein import journal
from rein.errors import ConfigError, shown
from rein.tracking.console import Console

USUAL = "runs"


def run(folder: str | None, host: str | None, port: str | None, console: Console) -> None:
    """Serve until Ctrl-C; raises ConfigError where folder, host or port cannot be had."""
    root = Path(folder or (USUAL if Path(USUAL).is_dir() else ".")).expanduser()
    if not root.is_dir():
        raise ConfigError(f"rein ui: {root} is no folder; give the folder that holds your runs")
    for name in ("starlette", "uvicorn"):
        _needed(name)
    from rein.ui.serve import LOOPBACK, PORT, serve

    serve(root, journal.standing, console, LOOPBACK if host is None else host, _number(port, PORT))


def _number(text: str | None, usual: int) -> int:
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"--port: {shown(text)} is no port; give one from 1 to 65535, or 0 for a free one")
    return int(text)


def _needed(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        why = shown(str(error))
        raise ConfigError(f"rein ui: needs a package ({why}); run pip install 'rein[ui]'") from error
