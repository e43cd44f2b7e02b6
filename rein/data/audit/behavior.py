"""Behavior log-probs in, batch by batch; what they say of how the rows were written out."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rein.data.audit.block import LogProbs
from rein.data.audit.numbers import Fact, distribution, share

STRIDE = 17  # every so many tokens go into the histogram
WIDTH, BINS = 0.25, 80  # nats, bins; the last one is open
TAILS = (-5.0, -10.0, -20.0)


@dataclass(slots=True)
class Behavior:
    """Counts over all counted tokens."""

    rows: int = 0
    tokens: int = 0
    total: float = 0.0
    zero: int = 0  # exactly 0: a token that had no alternative, or a value that was never computed
    above: int = 0  # above 0 within the tolerance of rounding
    lowest: float = 0.0
    at_lowest: int = 0
    below: dict[float, int] = field(default_factory=lambda: dict.fromkeys(TAILS, 0))
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    means: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, found: LogProbs | None) -> None:
        if found is None:
            return
        values = found.values
        low = float(values.min())
        self.rows += len(found.row_means)
        self.tokens += len(values)
        self.total += float(values.sum(dtype=np.float64))
        above = int(np.count_nonzero(values > 0))
        self.above += above
        self.zero += len(values) - above - int(np.count_nonzero(values < 0))
        at_low = int(np.count_nonzero(values == low))
        if low < self.lowest or not self.at_lowest:
            self.lowest, self.at_lowest = low, at_low
        elif low == self.lowest:
            self.at_lowest += at_low
        for tail in TAILS:
            if low < tail:
                self.below[tail] += int(np.count_nonzero(values < tail))
        bins = np.minimum(-values[::STRIDE] / WIDTH, BINS - 1).astype(np.int64)
        self.histogram += np.bincount(np.maximum(bins, 0), minlength=BINS)
        self.means.append(found.row_means.astype(np.float32))

    def facts(self, usable: int) -> Fact | None:
        """None where no row has them."""
        if not self.rows:
            return None
        return {
            "rows": self.rows,
            "rows_share": share(self.rows, usable),
            "tokens": self.tokens,
            "mean": self.total / self.tokens,
            "zero_share": self.zero / self.tokens,
            "above_zero": self.above,
            "lowest": self.lowest,
            "at_lowest": self.at_lowest,
            "below": {f"{-tail:g}": count / self.tokens for tail, count in self.below.items()},
            "row_mean": distribution(np.concatenate(self.means)),
            "token_histogram": {
                "edges": [-WIDTH * i for i in range(BINS, -1, -1)],
                "counts": self.histogram[::-1].tolist(),
                "open": True,
            },
        }
