"""One tracker in front of many. Watching must not hurt the run: a tracker that fails warns once, and
training goes on.

One that cannot even be opened stops the run at its start: what was asked for must work.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rein.protocols import Tracker
from rein.tables import lookup
from rein.tracking import TRACKERS
from rein.types import Metrics

ALWAYS = "jsonl"
CONSOLE = "console"  # the progress line, which the stage itself shows


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Fanout:
    """Implements protocols.Tracker over named trackers."""

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], None] = _to_stderr) -> None:
        self.trackers = trackers
        self._warn = warn
        self._failed: set[str] = set()

    def log(self, metrics: Metrics, number: int) -> None:
        for name, tracker in self.trackers.items():
            self._try(name, partial(tracker.log, metrics, number))

    def close(self) -> None:
        for name, tracker in self.trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a tracker's library raises: the run matters more
            if name not in self._failed:
                self._failed.add(name)
                self._warn(f"tracker {name}: {type(error).__name__} ({error}); training goes on without it")


def open_trackers(
    names: Sequence[str],
    folder: Path,
    *,
    from_number: int,
    warn: Callable[[str], None] = _to_stderr,
) -> Fanout:
    """The trackers of `trainer.logger`, and metrics.jsonl always. A resumed run gives where it goes on from.

    Raises ConfigError for an unknown name, and whatever says that a tracker cannot be opened.
    """
    wanted = dict.fromkeys([ALWAYS, *(name for name in names if name != CONSOLE)])
    factories = {name: lookup(TRACKERS, name, "trainer.logger") for name in wanted}
    fanout = Fanout({}, warn)
    try:
        for name, factory in factories.items():
            fanout.trackers[name] = factory(folder, from_number)
    except BaseException:
        fanout.close()
        raise
    return fanout
