"""Which demonstrations stand beside which actor updates: a share of each mini-batch's rows, in an order of
their own.

Takes rows, gives rows; what is left of a fraction is carried on. Its whole state is how many rows the actor
has been updated on. Knows no model and no loss.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import floor

from rein.data.batches import epoch_order
from rein.types import Demonstration


class Mixing:
    """A cursor over demonstrations, which go round epoch by epoch."""

    def __init__(self, rows: Sequence[Demonstration], share: float, *, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = list(rows), seed, shuffle
        self.share = Fraction(repr(share))  # as it was written: 0.29 of 100 rows is 29
        self.seen = 0
        self._epoch, self._order = -1, list[int]()

    def beside(self, rows: int) -> list[Demonstration]:
        """floor(carry + share x rows) demonstrations: those of the next mini-batch, of `rows` rows."""
        begin, end = floor(self.share * self.seen), floor(self.share * (self.seen + rows))
        return [self._at(place) for place in range(begin, end)]

    def advance(self, rows: int) -> None:
        """The update on a mini-batch of `rows` rows is over, applied or discarded."""
        self.seen += rows

    def mark(self) -> str:
        """One hash for the rows, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            for part in (row.prompt_ids, row.response_ids, row.response_mask):
                digest.update(len(part).to_bytes(8, "little") + part.tobytes())
        return digest.hexdigest()

    def _at(self, place: int) -> Demonstration:
        epoch, i = divmod(place, len(self.rows))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(len(self.rows), self.seed, epoch, self.shuffle)
        return self.rows[self._order[i]]
