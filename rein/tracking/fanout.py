"""One tracker in front of many. Watching must not hurt the run: a tracker that fails warns once and is left
alone, and training goes on. What it missed is in metrics.jsonl, and is told to it when the run is resumed.

One that cannot even be opened stops the run at its start: what was asked for must work.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rein.errors import ConfigError, ReinError, shown
from rein.protocols import Tracker
from rein.tables import lookup
from rein.tracking import READY, TRACKERS, Maker
from rein.tracking.run import KEY, OfNumber, Run
from rein.types import Metrics

ALWAYS = "jsonl"
CONSOLE = "console"  # what a person watches: the stage has it, and hands it over


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Fanout:
    """Implements protocols.Tracker over named trackers."""

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], None] = _to_stderr) -> None:
        self.trackers = trackers
        self.once = OfNumber()  # before all but metrics.jsonl, which has every line
        self._warn = warn
        self._failed: set[str] = set()

    def log(self, metrics: Metrics, number: int) -> None:
        new = self.once.new(metrics, number)
        for name, tracker in self.trackers.items():
            told = metrics if name == ALWAYS else new
            if told:
                self._try(name, partial(tracker.log, told, number))

    def close(self) -> None:
        for name, tracker in self.trackers.items():
            self._try(name, tracker.close)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        if name in self._failed:  # each call may wait for a server that is gone
            return
        try:
            act()
        except Exception as error:  # whatever a tracker's library raises: the run matters more
            self._failed.add(name)
            self._warn(f"tracker {name}: {type(error).__name__} ({error}); training goes on without it")


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError, before any work, for a tracker that is unknown or lacks what it stands on."""
    for name in _wanted(names):
        lookup(TRACKERS, name, KEY)
        with _said(name):
            READY.get(name, lambda: None)()


def open_trackers(
    names: Sequence[str],
    run: Run,
    *,
    warn: Callable[[str], None] = _to_stderr,
    console: Maker | None = None,  # opens the tracker of that name
) -> Fanout:
    """Those of `trainer.logger`, and metrics.jsonl always. Raises ReinError if one cannot be opened."""
    makers = {name: lookup(TRACKERS, name, KEY) for name in _wanted(names)}
    if console is not None and CONSOLE in names:
        makers[CONSOLE] = console
    fanout = Fanout({}, warn)
    try:
        for name, make in makers.items():
            with _said(name):
                fanout.trackers[name] = make(run)
    except BaseException:
        fanout.close()
        raise
    for number, _, metrics in run.kept():
        fanout.once.new(metrics, number)
    return fanout


def _wanted(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([ALWAYS, *(name for name in names if name != CONSOLE)]))


@contextmanager
def _said(name: str) -> Iterator[None]:
    """Whatever a tracker's library raises when it is opened, as a ConfigError of one line."""
    try:
        yield
    except ReinError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {shown(str(error), 200)}"
        raise ConfigError(
            f"{KEY}: {name} cannot be opened ({why}); mend its settings, or leave {name} out"
        ) from error
