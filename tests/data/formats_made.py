"""What converting some rows gave, and small texts that the tests share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Converted:
    rows: list[dict[str, Any]]
    said: str
    rejects: list[dict[str, str]]
    path: Path

    @property
    def row(self) -> dict[str, Any]:
        """The only row."""
        (one,) = self.rows
        return one


Convert = Callable[..., Converted]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}
