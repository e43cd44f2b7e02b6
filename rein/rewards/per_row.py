"""A reward from a function of one row. Knows no reward."""

from collections.abc import Callable, Sequence

from rein.protocols import Reward
from rein.types import Trajectory


def per_row(score: Callable[[Trajectory], float | None]) -> Reward:
    """The reward that scores every row by itself."""

    def reward(rows: Sequence[Trajectory]) -> list[float | None]:
        return [score(row) for row in rows]

    return reward
