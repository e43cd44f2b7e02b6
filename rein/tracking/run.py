"""What a tracker is opened with: where a run is, what it is called, where it goes on from, what was logged.

trackers.json in the run's folder keeps each tracker's own id of the run, so that a resumed run is the same
there. metrics.jsonl is the truth: a tracker that lacks some of it is told it from there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rein.config.load import write_json
from rein.errors import ConfigError, shown
from rein.protocols import Tracker
from rein.tracking.jsonl import read_metrics
from rein.types import Metrics

METRICS, IDS = "metrics.jsonl", "trackers.json"
KEY = "trainer.logger"


@dataclass(frozen=True)
class Run:
    """One stage of a run, as its trackers see it."""

    folder: Path
    from_number: int = 0  # the update number it goes on from; 0: from the start, as a run of its own
    project: str = "rein"
    name: str = "run"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the resolved recipe, nested

    def id_of(self, tracker: str) -> str | None:
        """The tracker's own id of this run, where it goes on and the tracker was there before."""
        known = self._ids().get(tracker) if self.from_number else None
        return None if known is None else str(known)

    def keep_id(self, tracker: str, known_as: str) -> None:
        write_json(self.folder / IDS, self._ids() | {tracker: known_as})

    def kept(self) -> Iterator[tuple[int, float, Metrics]]:
        """Number, time and finite metrics of each line that the resumed point has reached, each name of a
        number once.
        """
        once = OfNumber()
        for line in read_metrics(self.folder / METRICS) if self.from_number else []:
            number, when = line.pop("number"), line.pop("time", 0.0)
            if number <= self.from_number:
                finite = {name: value for name, value in line.items() if value is not None}
                yield number, when, once.new(finite, number)

    def _ids(self) -> dict[str, Any]:
        path = self.folder / IDS
        try:
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); remove it") from error
        if not isinstance(known, dict):
            raise ConfigError(f"{path}: no trackers with their ids; remove it")
        return known


class OfNumber:
    """Lets each name of an update number pass once: the loop times its parts more than once at the number
    where it ends or goes on, and a curve has one point there.
    """

    def __init__(self) -> None:
        self._number, self._told = -1, set[str]()

    def new(self, metrics: Metrics, number: int) -> Metrics:
        if number != self._number:
            self._number, self._told = number, set()
        found = {name: value for name, value in metrics.items() if name not in self._told}
        self._told |= metrics.keys()
        return found


class Once:
    """Implements protocols.Tracker before a store that only appends: what the store has is not told again,
    what it lacks of metrics.jsonl is told first.
    """

    def __init__(self, tracker: Tracker, run: Run, has: Callable[[str, int], bool]) -> None:
        self._tracker, self._has = tracker, has
        for number, _, metrics in run.kept():
            self.log(metrics, number)

    def log(self, metrics: Metrics, number: int) -> None:
        new = {name: value for name, value in metrics.items() if not self._has(name, number)}
        if new:
            self._tracker.log(new, number)

    def close(self) -> None:
        self._tracker.close()


def package(name: str, extra: str) -> Any:
    """Import what a tracker stands on. Raises ConfigError that names the extra where it is absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        why = shown(str(error))
        raise ConfigError(
            f"{KEY}: {extra} needs a package ({why}); run pip install 'rein[{extra}]'"
        ) from error


def set_aside(folder: Path, pattern: str) -> None:
    """Rename local files of a tracker that are about to be written anew, and whole: nothing is deleted."""
    for earlier in sorted(folder.glob(pattern)):
        earlier.rename(earlier.with_name(f"replaced-{earlier.name}"))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found
