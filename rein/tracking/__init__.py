"""Where metrics and words go. Knows nothing of models or data.

A tracker of the table is opened with the run's folder and the update number it goes on from (0: from the
start).
"""

from collections.abc import Callable
from pathlib import Path

from rein.protocols import Tracker
from rein.tracking.jsonl import JsonlTracker


def jsonl(folder: Path, from_number: int) -> Tracker:
    """metrics.jsonl in the run's folder."""
    return JsonlTracker(folder / "metrics.jsonl", from_number)


TRACKERS: dict[str, Callable[[Path, int], Tracker]] = {"jsonl": jsonl}
