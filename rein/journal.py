"""The journal: what guards said and what was done, one JSON object per line, never rewritten.

{"seq": 3, "time": 1764430000.1, "number": 57, "kind": "verdict", "rule": "kl_high",
 "metric": "probe/kl_reference", "value": 0.31, "limit": 0.3, "action": "rollback", "reason": "...",
 "from": 57, "to": 40, "changed": {"lr": [1.0, 0.3]}}

Each line is on disk before the run goes on. A rollback does not touch it. A run that resumes from a snapshot
goes through the updates after it again: its `resume` line says how many lines still hold (`keeps`), and
`standing` leaves out what came between. Knows nothing of rules or models.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rein.errors import CheckpointError

RESUME = "resume"


class Journal:
    """Appends to one file. Raises CheckpointError where that cannot be done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = read(path)
        self.seq = lines[-1]["seq"] if lines else 0

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Write one line and see it on disk."""
        self.seq += 1
        line: dict[str, Any] = _finite(
            {"seq": self.seq, "time": round(time.time(), 3), "kind": kind, **facts}
        )
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a line that a kill cut off
                        file.write(b"\n")
                file.write(text.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be written ({error.strerror}); free the disk or choose another out="
            ) from error
        return line

    def resumed(self, keeps: int, number: int) -> None:
        """The run goes on from a snapshot that knew the first `keeps` lines."""
        if self.seq > keeps:
            self.append(RESUME, number=number, keeps=keeps)

    def clear(self) -> None:
        """A run that starts anew (resume=never)."""
        self.path.unlink(missing_ok=True)
        self.seq = 0


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; what a kill cut off is left out."""
    if not path.exists():
        return []
    found = []
    for text in path.read_bytes().split(b"\n"):  # text in a line may hold what splitlines() would cut at
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("seq"), int):
            found.append(line)
    return found


def standing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that hold: without those that a resume has gone through again."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line["kind"] == RESUME:
            found = [before for before in found if before["seq"] <= line["keeps"]]
        else:
            found.append(line)
    return found


def _finite(value: Any) -> Any:
    """JSON lacks NaN and infinity: their names instead."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
