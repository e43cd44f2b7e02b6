"""What the list says of a run: state, outcome, score, KL, guards; read again only where files have changed.

Knows the files a run leaves and none of what wrote them; which journal lines still hold is passed in.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rein.errors import shown
from rein.report import charts, events
from rein.report.evaluation import outcome
from rein.ui.folder import STAGES, Absent, Broken, Folder, read_json
from rein.ui.lines import Curves, Events

Lines = list[dict[str, Any]]
Standing = Callable[[Lines], Lines]

SCORES = ("val/score", "ope/score")  # the first that there is
KL = "probe/kl_reference"
WITH_CURVES = ("sft", "reward", "train")
MOST_OPEN = 8  # runs whose whole curves are kept at hand
ELSEWHERE = 600  # seconds without a new line after which a run on another machine counts as ended
TONES = {"running": "accent", "done": "good", "paused": "second", "failed": "bad", "killed": "bad"}


@dataclass(slots=True)
class Summary:
    """One row of the list."""

    name: str
    state: str
    why: str
    outcome: dict[str, Any] | None = None  # as the report says it
    lift: float | None = None
    scores: list[tuple[int, float]] = field(default_factory=list)
    kl: float | None = None
    updates: int | None = None
    guards: int = 0
    guards_said: str = ""
    seconds: float | None = None
    notes: list[str] = field(default_factory=list)  # files that could not be read

    @property
    def tone(self) -> str:
        return TONES[self.state]

    @property
    def score(self) -> float | None:
        return self.scores[-1][1] if self.scores else None


class Runs:
    """All runs of a folder."""

    def __init__(self, folder: Folder, standing: Standing) -> None:
        self.folder, self.standing = folder, standing
        self._brief: dict[str, Curves] = {}
        self._events: dict[str, Events] = {}
        self._whole: OrderedDict[str, dict[str, Curves]] = OrderedDict()

    def all(self) -> tuple[list[Summary], bool]:
        names, cut = self.folder.runs()
        return [self.summary(name) for name in names], cut

    def names(self) -> list[str]:
        return self.folder.runs()[0]

    def known(self, name: str) -> str:
        """The name, if it is that of a run; raises Absent."""
        if name not in self.names():
            raise Absent(f"{shown(name) or 'run'}: is no run in this folder")
        return name

    def manifests(self, name: str) -> dict[str, dict[str, Any]]:
        found = {stage: self._object(name, f"{stage}/manifest.json") for stage in STAGES}
        return {stage: body for stage, body in found.items() if body}

    def settings(self, name: str) -> dict[str, Any]:
        """The resolved recipe: the run's, else that of its last stage."""
        if recipe := self._object(name, "recipe.json"):
            return recipe
        recipes = [body.get("recipe") for body in self.manifests(name).values()]
        return next((recipe for recipe in reversed(recipes) if isinstance(recipe, dict)), {})

    def whole(self, name: str) -> dict[str, Any]:
        """summary.json, once the run has one."""
        return self._object(name, "summary.json") or {}

    def evaluation(self, name: str) -> dict[str, Any] | None:
        """evaluation.json: of generated answers, or of stored ones."""
        body = self._object(name, "evaluate/evaluation.json")
        return body if body and ("lift" in body or "off_policy" in body) else None

    def journal(self, name: str) -> Lines:
        """Its standing lines."""
        found = self._events.setdefault(name, Events())
        found.refresh(self.folder.file(name, "train/journal.jsonl"))
        return self.standing(found.lines)

    def curves(self, name: str) -> dict[str, Curves]:
        """Of each stage that has them, all that is drawn."""
        known = self._whole.pop(name, None)
        if known is None:
            drawn = {stage: {m for c in charts.CHARTS[stage] for m in c.lines} for stage in WITH_CURVES}
            known = {stage: Curves(names) for stage, names in drawn.items()}
        self._whole[name] = known
        while len(self._whole) > MOST_OPEN:
            self._whole.popitem(last=False)
        for stage, curves in known.items():
            curves.refresh(self.folder.file(name, f"{stage}/metrics.jsonl"))
        return known

    def summary(self, name: str) -> Summary:
        notes: list[str] = []
        brief = self._brief.setdefault(name, Curves((*SCORES, KL)))
        brief.refresh(self.folder.file(name, "train/metrics.jsonl"))
        lines, manifests = self.journal(name), self._attempt(notes, dict, self.manifests, name)
        state, why = self._state(name, manifests, lines, brief.number)
        found = Summary(name, state, why, notes=notes, updates=brief.number)
        evaluation = self._attempt(notes, lambda: None, self.evaluation, name)
        try:
            found.outcome = outcome(evaluation)
            found.lift = None if evaluation is None else _lift(evaluation)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            notes.append("evaluate/evaluation.json: does not hold an evaluation; look at the file")
        found.scores = next((points for m in SCORES if (points := _points(brief.lines, m))), [])
        found.kl = next((value for _, value in reversed(_points(brief.lines, KL))), None)
        seen = events.events([line for line in lines if line["kind"] != "end"])
        found.guards = len(seen)
        found.guards_said = events.outcome(lines, events.events(lines)) if lines else ""
        found.seconds = self._seconds(name, state, manifests)
        return found

    def _attempt(
        self, notes: list[str], nothing: Callable[[], Any], of: Callable[[str], Any], name: str
    ) -> Any:
        """What a file holds; nothing, and a note, where it cannot be read."""
        try:
            return of(name)
        except Broken as error:
            notes.append(str(error))
            return nothing()

    def _object(self, name: str, file: str) -> dict[str, Any] | None:
        path = self.folder.file(name, file)
        if path is None:
            return None
        try:
            return self.folder.kept(path, read_json)
        except OSError:
            return None  # removed just now
        except Broken as error:
            raise Broken(f"{file.rpartition('/')[0]}/{error}".removeprefix("/")) from error

    def _state(
        self, name: str, manifests: Mapping[str, Any], lines: Lines, number: int | None
    ) -> tuple[str, str]:
        """One of TONES, and the reason in words."""
        holder = _holder(self.folder.file(name, ".lock"))
        if holder is not None and _alive(holder, self._touched(name)):
            return "running", f"process {holder.get('pid')} on {shown(str(holder.get('host')))}"
        try:
            asked = self.settings(name).get("stages")
        except Broken:
            asked = None
        wanted = [stage for stage in asked if stage in STAGES] if isinstance(asked, list) else list(manifests)
        left = [stage for stage in wanted if stage not in manifests]
        end = lines[-1] if lines and lines[-1]["kind"] == "end" else None
        if end is not None and "train" not in manifests:
            return "paused", shown(f"{end.get('action')}: {end.get('reason')}", 200)
        if holder is not None:
            return "killed", f"process {holder.get('pid')} ended without a word; the same command goes on"
        if not left:
            return "done", "" if manifests else "nothing was made"
        saved = self._saved(name)
        if left[0] == "train" and saved and saved == number:
            return "paused", f"stopped after update {saved}, state saved; the same command goes on"
        return "failed", f"{left[0]} did not finish, and no process is at work"

    def _saved(self, name: str) -> int | None:
        """The update of the newest saved state."""
        found = []
        with suppress(Absent, OSError):
            for entry in os.scandir(self.folder.path(name, "train/snapshots")):
                if match := re.fullmatch(r"step-(\d{1,12})", entry.name):
                    found.append(int(match[1]))
        return max(found, default=None)

    def _touched(self, name: str) -> float:
        path = self.folder.file(name, "train/metrics.jsonl")
        return path.stat().st_mtime if path else 0.0

    def _seconds(self, name: str, state: str, manifests: Mapping[str, Any]) -> float | None:
        spent = [_number(body.get("seconds")) for body in manifests.values()]
        total = sum(value for value in spent if value is not None)
        if state == "running":
            since = _number((_holder(self.folder.file(name, ".lock")) or {}).get("since"))
            return None if since is None else max(0.0, time.time() - since)
        with suppress(Broken):
            whole = _number(self.whole(name).get("seconds"))
            return whole if whole is not None else total or None
        return total or None


def _holder(lock: Path | None) -> dict[str, Any] | None:
    """Who wrote the lock file; it stays behind where a process was killed."""
    with suppress(Broken):
        return None if lock is None else read_json(lock)
    return {}


def _alive(who: Mapping[str, Any], touched: float) -> bool:
    """Whether that process is at work. The lock itself is left alone: to try it could refuse a run."""
    pid, since = who.get("pid"), _number(who.get("since")) or 0.0
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    if who.get("host") != socket.gethostname():
        return time.time() - max(since, touched) < ELSEWHERE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    started = _started(pid)
    return started is None or started < since + 60  # else another process has its number now


def _started(pid: int) -> float | None:
    """When a process began, where the system says so."""
    try:
        ticks = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _lift(evaluation: Mapping[str, Any]) -> float:
    """Of generated answers, or as stored ones estimate it."""
    if "lift" in evaluation:
        return float(evaluation["lift"])
    found = evaluation["off_policy"]
    return float(found["difference"][found["reported"]]["score"])


def _points(lines: Lines, metric: str) -> list[tuple[int, float]]:
    found = [(line["number"], line[metric]) for line in lines if line.get(metric) is not None]
    return [(number, value) for number, value in found if value - value == 0]  # finite


def _number(value: Any) -> float | None:
    try:
        found = float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None
    return found if found is not None and found - found == 0 else None
