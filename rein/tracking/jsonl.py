"""Metrics as one JSON object per line: `{"number": 12, "time": 1764430000.1, "actor/ppo_kl": 0.01}`. Always
complete.

Each line is flushed, so a killed run loses at most the line it was writing. NaN and infinity, which JSON
lacks, become null. A resumed run drops the lines that the resumed point has not reached, so no number is
there twice.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from rein.errors import CheckpointError
from rein.types import Metrics

TIMES = ("time", "timing_s/", "timing_per_token_ms/", "perf/")  # begin the names of what no two runs share


class JsonlTracker:
    """Implements protocols.Tracker on a file.

    `from_number` 0 starts the file anew; otherwise lines up to and including that number are kept. Raises
    CheckpointError where the file cannot be written.
    """

    def __init__(self, path: Path, from_number: int = 0) -> None:
        kept = [line for line in read_metrics(path) if line["number"] <= from_number] if from_number else []
        draft = path.with_name(f".{path.name}.draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(draft, path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be written ({error}); free the disk or choose another out="
            ) from error

    def log(self, metrics: Metrics, number: int) -> None:
        numbers = {name: _json_number(value) for name, value in metrics.items()}
        line = {"number": number, "time": round(time.time(), 3), **numbers}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _json_number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in order; none where there is no file. A last line cut off by a kill is
    left out.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = []
    for index, text in enumerate(lines):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            if index == len(lines) - 1:
                break
            raise CheckpointError(f"{path} line {index + 1}: no JSON ({error}); remove that line") from error
        if not isinstance(line, dict) or not isinstance(line.get("number"), int):
            raise CheckpointError(f"{path} line {index + 1}: no metrics with their number; remove that line")
        found.append(line)
    return found


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without times, to be held against another run's; those that hold times alone are left out."""
    found = [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]
    return [line for line in found if len(line) > 1]
