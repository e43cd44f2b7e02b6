"""A reward model as a reward. Rows in, its scores out; which model, and whether its scores are cached, is the
caller's.
"""

import math
from collections.abc import Iterator, Sequence

from rein.errors import EngineError
from rein.protocols import Reward, Scorer
from rein.types import Trajectory


def model(*, scorer: Scorer, max_tokens: int = 8192) -> Reward:
    """The score the reward model gives to prompt + response, read up to `max_tokens` tokens at a time.

    Raises EngineError where the model's score is not finite.
    """

    def reward(rows: Sequence[Trajectory]) -> list[float | None]:
        scores: list[float | None] = []
        for batch in _batches(rows, max_tokens):
            for row, score in zip(batch, scorer.scores(batch).tolist(), strict=True):
                if not math.isfinite(score):
                    raise EngineError(f"{row.where}: the reward model scores it {score}; check its weights")
                scores.append(score)
        return scores

    return reward


def _batches(rows: Sequence[Trajectory], max_tokens: int) -> Iterator[Sequence[Trajectory]]:
    """The rows in order, as many at a time as fit; a longer row goes alone."""
    start, tokens = 0, 0
    for index, row in enumerate(rows):
        length = len(row.prompt_ids) + len(row.response_ids)
        if index > start and tokens + length > max_tokens:
            yield rows[start:index]
            start, tokens = index, 0
        tokens += length
    if start < len(rows):
        yield rows[start:]
