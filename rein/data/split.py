"""Rows in, two lists out: what is trained on, and what is held out, apart by prompt.

The prompt is known by its ids, so every kind of row of one prompt falls on the same side. Knows no file.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from rein.types import Ids

LEAST = 64
MOST = 500


class HasPrompt(Protocol):
    @property
    def prompt_ids(self) -> Ids: ...


Row = TypeVar("Row", bound=HasPrompt)


def prompt_key(prompt_ids: Ids) -> str:
    """Content hash of a prompt."""
    return hashlib.blake2b(
        np.ascontiguousarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=16
    ).hexdigest()


def held_prompts(prompts: int, fraction: float) -> int:
    """How many prompts to hold out: the fraction, at least 64, at most 500, and never more than half."""
    if fraction <= 0:
        return 0
    return min(max(round(fraction * prompts), LEAST), MOST, prompts // 2)


def holdout(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, rows held out), both in the order given.

    Which prompts are held out follows from a hash of seed and prompt alone: not from the order of rows, nor
    from how many rows a prompt has.
    """
    keys = [prompt_key(row.prompt_ids) for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    held = set(ranked[: held_prompts(len(ranked), fraction)])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held]
