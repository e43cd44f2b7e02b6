"""Modules of a user's, written on the spot."""

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

COUNT = itertools.count()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module of one's own that can be imported; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_rules_{next(COUNT)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write
