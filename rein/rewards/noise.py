"""A judge that errs: accepts a fixed share of wrong answers, as reward models do. For experiments.

Whether an answer is wrongly accepted depends on (prompt, response, seed) alone: the same answer always gets
the same score.
"""

import hashlib
from collections.abc import Sequence

from rein.errors import ConfigError
from rein.protocols import Reward
from rein.types import Trajectory


def noisy(*, inner: Reward, accept_wrong: float = 0.4, seed: int = 0, right: float = 1.0) -> Reward:
    """`inner`'s score, but `right` for a share `accept_wrong` of the rows that score less than `right`."""
    if not 0 <= accept_wrong <= 1:
        raise ConfigError(f"reward noisy: accept_wrong={accept_wrong}; give a share from 0 to 1")

    def reward(rows: Sequence[Trajectory]) -> list[float | None]:
        return [
            right if score is not None and score < right and _share(row, seed) < accept_wrong else score
            for row, score in zip(rows, inner(rows), strict=True)
        ]

    return reward


def _share(row: Trajectory, seed: int) -> float:
    """A number in [0, 1) that belongs to this prompt, response and seed."""
    text = "\x00".join((row.text, row.response, str(seed)))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
