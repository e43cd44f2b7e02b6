"""A reward model as a reward. Rows in, its scores out; which model, and whether its scores are cached, is
the caller's.
"""

import math
from collections.abc import Sequence

from rein.errors import EngineError
from rein.protocols import Reward, Scorer
from rein.types import Trajectory


def model(*, scorer: Scorer, batch_size: int = 64) -> Reward:
    """The score the reward model gives to prompt + response, read `batch_size` rows at a time.

    Raises EngineError where the model's score is not finite.
    """

    def reward(rows: Sequence[Trajectory]) -> list[float | None]:
        scores: list[float | None] = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            for row, score in zip(batch, scorer.scores(batch).tolist(), strict=True):
                if not math.isfinite(score):
                    raise EngineError(
                        f"{row.where}: the reward model scores it {score}; check the reward model's weights"
                    )
                scores.append(score)
        return scores

    return reward
