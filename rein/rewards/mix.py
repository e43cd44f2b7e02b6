"""Several rewards as one: the weighted sum of the parts. One part alone is a mix of one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rein.errors import ConfigError
from rein.protocols import Reward
from rein.types import Metrics, Trajectory

Scores = Sequence[float | None]


@dataclass(frozen=True)
class Part:
    """One reward of the mix."""

    name: str
    weight: float
    reward: Reward


class Mix:
    """score = sum of weight * part; a row that one part cannot score has no score."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def __call__(self, rows: Sequence[Trajectory]) -> list[float | None]:
        return self.total(self.by_part(rows))

    @property
    def notes(self) -> list[str]:
        """What a person should know of the parts, such as how code is shut in."""
        return [note for part in self.parts for note in getattr(part.reward, "notes", ())]

    def by_part(self, rows: Sequence[Trajectory]) -> dict[str, Scores]:
        """What each part says, unweighted."""
        return {part.name: part.reward(rows) for part in self.parts}

    def total(self, by_part: Mapping[str, Scores]) -> list[float | None]:
        """The weighted sum of what the parts said."""
        columns = [by_part[part.name] for part in self.parts]
        weights = [part.weight for part in self.parts]
        totals = [_sum(weights, row) for row in zip(*columns, strict=True)]
        for row, total in enumerate(totals):
            if total is not None and not math.isfinite(total):
                parts = zip(self.parts, columns, strict=True)
                said = ", ".join(f"{part.name} {part.weight:g} x {column[row]}" for part, column in parts)
                raise ConfigError(
                    f"score.reward: row {row + 1} scores {total} ({said}); correct weights and options"
                )
        return totals


def _sum(weights: Sequence[float], scores: Sequence[float | None]) -> float | None:
    total = 0.0
    for weight, score in zip(weights, scores, strict=True):
        if score is None:
            return None
        total += weight * score
    return total


def part_metrics(by_part: Mapping[str, Scores]) -> Metrics:
    """Mean of each part over the rows it scored, and how many it could not: `score/gsm8k/mean`,
    `score/gsm8k/unscored`.
    """
    metrics: Metrics = {}
    for name, scores in by_part.items():
        known = [score for score in scores if score is not None]
        if known:
            metrics[f"score/{name}/mean"] = sum(known) / len(known)
        metrics[f"score/{name}/unscored"] = float(len(scores) - len(known))
    return metrics
