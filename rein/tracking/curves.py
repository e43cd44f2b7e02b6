"""The metrics that a person watches: the latest value of each, and its history as a line of blocks.

Metrics in under a monotone update number, text out. Points that a rollback undid leave, and their place is
marked. Knows nothing of terminals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rein.types import Metrics

ROLLED_BACK_TO = "guard/rolled_back_to"  # the number of the last update that still holds
WATCHED = (  # in this order; of the names on a line the first that the run has
    ("val/score", "ope/score"),
    ("probe/kl_reference",),
    ("actor/entropy", "probe/entropy"),
    ("actor/pg_clipfrac", "actor/dpo_accuracy"),
    ("critic/vf_explained_var",),
    ("train/loss",),
    ("train/accuracy",),
    ("train/grad_norm",),
    ("train/lr",),
    ("perf/throughput",),
)
NAMES = {name for names in WATCHED for name in names}
MOST = 256  # points of a curve; then two neighbours become one
BLOCKS, ASCII, MARK = "▁▂▃▄▅▆▇█", ".:-=+*#@", "x"


class Curve:
    """One metric: `points` of number and value, finite, in order; `latest` may be NaN."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.latest = math.nan

    def add(self, number: int, value: float) -> None:
        self.latest = value
        if math.isfinite(value):
            self.points.append((number, value))
        if len(self.points) > MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[len(self.points) // 2 * 2 :]
            self.points = [(later, (one + other) / 2) for (_, one), (later, other) in pairs] + odd

    def drop_after(self, number: int) -> None:
        while self.points and self.points[-1][0] > number:
            self.points.pop()
        self.latest = self.points[-1][1] if self.points else math.nan


class Curves:
    """Implements protocols.Tracker in memory that is bounded."""

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.undone: list[tuple[int, int]] = []  # after the first number, up to the second
        self.begin, self.number = -1, -1  # numbers lie above begin
        self.closed = False

    def log(self, metrics: Metrics, number: int) -> None:
        if self.number < 0:
            self.begin = number - 1
        self.number = number
        if ROLLED_BACK_TO in metrics:
            self._roll_back(int(metrics[ROLLED_BACK_TO]))
        for name in metrics.keys() & NAMES:
            self.curves.setdefault(name, Curve()).add(number, float(metrics[name]))

    def close(self) -> None:
        self.closed = True

    def shown(self) -> Iterator[tuple[str, Curve]]:
        """Those of WATCHED that the run has."""
        for names in WATCHED:
            if name := next((name for name in names if name in self.curves), None):
                yield name, self.curves[name]

    def line(self, curve: Curve, width: int, *, blocks: str = BLOCKS) -> str:
        """Its history over all numbers so far: in each column the mean of its points, or what held before.

        The lowest block is the least of the columns, the highest the most.
        """
        begin, span = self.begin + 1, max(self.number - self.begin, 1)
        columns = min(width, span)
        found: list[list[float]] = [[] for _ in range(columns)]
        for number, value in list(curve.points):
            found[min((number - begin) * columns // span, columns - 1)].append(value)
        means = [sum(values) / len(values) if values else None for values in found]
        known = [mean for mean in means if mean is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        drawn, held = [], " "
        for mean in means:
            if mean is not None:
                share = (mean - low) / (high - low) if high > low else 0.5
                held = blocks[min(int(share * len(blocks)), len(blocks) - 1)]
            drawn.append(held)
        for after, last in self.undone:
            gone = range(max(after + 1 - begin, 0) * columns // span, (last - begin) * columns // span + 1)
            for column in gone:
                if column < columns and (means[column] is None or column == gone[-1]):
                    drawn[column] = MARK
        return "".join(drawn)

    def _roll_back(self, number: int) -> None:
        self.undone.append((number, self.number))
        for curve in self.curves.values():
            curve.drop_after(number)
