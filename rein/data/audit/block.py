"""What the tally takes: usable rows of one batch as arrays, whoever judged them.

A side is a prompt, a response or the rejected answer of a pair. Ids and text are hashed apart: a file may
hold either, and an evaluation file the other.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rein.data.audit.hashing import NONE, Keys
from rein.types import Ids, Mask

UNKNOWN, STOP, LENGTH, OTHER = 0, 1, 2, 3  # how a response ended
Content = Ids | str
NO_TEXT = pa.array([], pa.large_string())


@dataclass(frozen=True, slots=True)
class Side:
    """One part of n rows."""

    text_key: Keys  # [n] NONE where there is no text
    ids_key: Keys  # [n] NONE where there are no ids
    length: NDArray[np.int64]  # [n] tokens or characters
    in_tokens: Mask  # [n] which of the two
    last: NDArray[np.int64]  # [n] the last id, -1 without ids
    content: Callable[[int], Content]  # of one row, for the sample
    texts: pa.Array = field(default_factory=lambda: NO_TEXT)  # all there are, in the order of the rows
    text_rows: NDArray[np.int64] | None = None  # [texts] the row of each; None: one a row

    @property
    def key(self) -> Keys:
        """Text before ids: files that hold the same text have the same keys."""
        return np.where(self.text_key != NONE, self.text_key, self.ids_key)


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Counted tokens' behavior log-probs."""

    values: NDArray[np.float32]  # [tokens] in the order of the rows
    row_means: NDArray[np.float64]  # [rows that have them]


@dataclass(frozen=True, slots=True)
class Block:
    """n usable rows."""

    where: Callable[[int], str]
    prompt: Side
    group: Keys  # [n] NONE where no group is stored
    response: Side | None = None  # of a pair, the chosen answer
    rejected: Side | None = None
    score: NDArray[np.float64] | None = None  # [n] NaN where there is none
    finish: NDArray[np.int8] | None = None  # [n]
    log_probs: LogProbs | None = None
    names: dict[str, Counter[str]] = field(default_factory=dict)  # column -> value -> rows
    noticed: Counter[str] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        return len(self.group)


def pick(side: Side, rows: NDArray[np.int64]) -> Side:
    """The side of some of the rows."""
    text_rows = np.arange(len(side.texts)) if side.text_rows is None else side.text_rows
    place = np.full(len(side.length), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    kept = np.flatnonzero(place[text_rows] >= 0) if len(side.texts) else np.zeros(0, np.int64)
    return Side(
        side.text_key[rows],
        side.ids_key[rows],
        side.length[rows],
        side.in_tokens[rows],
        side.last[rows],
        lambda i: side.content(int(rows[i])),
        side.texts.take(pa.array(kept)),
        place[text_rows[kept]] if len(side.texts) else None,
    )
