"""A sample of rows that every row has the same chance to be in, and what is too costly to ask of all of them.

Repetition: the share of 4-grams of an answer that stood there before. Near-duplicates: MinHash (Broder 1997)
over 5-grams, candidates by bands, alike where a share of NEAR of the minima agrees. Units are token ids,
or words where text is all there is.
"""

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rein.data.audit.block import Content
from rein.data.audit.hashing import Keys, mix

SIZE = 4096  # rows
LONGEST = 1024  # units of a row that are looked at
SHINGLE, REPEATED = 5, 4
BANDS, ROWS_OF_BAND = 16, 4
NEAR = 0.8  # Jaccard similarity of the shingles
_WORD = re.compile(r"\w+|[^\w\s]")
_SEEDS: Keys = mix(np.arange(1, BANDS * ROWS_OF_BAND + 1, dtype=np.uint64))


@dataclass(slots=True)
class Sample:
    """The rows with the lowest hash of their number: random, and the same every time."""

    size: int = SIZE
    seen: int = 0
    units: dict[int, Keys] = field(default_factory=dict)  # row number -> its units
    keys: dict[int, int] = field(default_factory=dict)
    _ranks: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    _rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, keys: Keys) -> Iterator[int]:
        """Offer rows by their keys; yields the places of those whose content is wanted (see `keep`)."""
        rows = np.arange(self.seen, self.seen + len(keys))
        ranks = mix(rows.astype(np.uint64) + np.uint64(1))
        self.seen += len(keys)
        if len(self._ranks) >= self.size:
            able = np.flatnonzero(ranks < self._ranks[-1])
            rows, ranks = rows[able], ranks[able]
        both = np.concatenate((self._ranks, ranks))
        order = np.argsort(both)[: self.size]
        former, all_rows = set(self._rows.tolist()), np.concatenate((self._rows, rows))[order]
        self._ranks, self._rows = both[order], all_rows
        kept = set(all_rows.tolist())
        for gone in former - kept:
            self.units.pop(gone, None)
            self.keys.pop(gone, None)
        start = self.seen - len(keys)
        for row in sorted(kept - former):
            self.keys[row] = int(keys[row - start])
            yield row - start

    def keep(self, place: int, added: int, content: Content) -> None:
        """The content of a row that `add` asked for, one of the last `added`."""
        self.units[self.seen - added + place] = units(content)


def units(content: Content) -> Keys:
    """Token ids as they are; of text its words, or its characters where it is written without spaces."""
    if not isinstance(content, str):
        return content[:LONGEST].astype(np.uint64)
    words = _WORD.findall(content[: 16 * LONGEST])
    words = list(content) if len(words) * 20 < len(content) else words
    return np.array(
        [zlib.crc32(word.encode("utf-8", "replace")) for word in words[:LONGEST]], dtype=np.uint64
    )


def repetition(row: Keys) -> float | None:
    """Share of the n-grams that occurred before in the row; None where it is too short to have two."""
    grams = _grams(row, REPEATED)
    return None if len(grams) < 2 else 1.0 - len(np.unique(grams)) / len(grams)


def near_duplicates(sample: Sample) -> tuple[int, int]:
    """(rows compared, rows among them that are nearly another row's copy); exact copies are compared once."""
    first = {key: row for row, key in reversed(sample.keys.items()) if row in sample.units}
    rows = [sample.units[row] for row in first.values()]
    made = [_minima(row) for row in rows if len(row) >= 2 * SHINGLE]
    if len(made) < 2:
        return len(made), 0
    return len(made), len(_alike(np.stack(made)))


def _alike(minima: NDArray[np.uint64]) -> set[int]:
    found: set[int] = set()
    for band in range(BANDS):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        part = np.ascontiguousarray(minima[:, band * ROWS_OF_BAND : (band + 1) * ROWS_OF_BAND])
        for row in range(len(part)):
            buckets[part[row].tobytes()].append(row)
        for bucket in buckets.values():
            found |= _alike_in(bucket, minima) if len(bucket) > 1 else set()
    return found


def _alike_in(bucket: Sequence[int], minima: NDArray[np.uint64]) -> set[int]:
    """Rows of a bucket that agree with a row before them; with the first few, so that it stays linear."""
    found: set[int] = set()
    for leader in bucket[:8]:
        same = (minima[bucket] == minima[leader]).mean(axis=1) >= NEAR
        close = {row for row, agrees in zip(bucket, same, strict=True) if agrees and row != leader}
        found |= close | ({leader} if close else set())
    return found


def _minima(row: Keys) -> Keys:
    grams = np.unique(_grams(row, SHINGLE))
    with np.errstate(over="ignore"):
        minima: Keys = mix(grams[None, :] ^ _SEEDS[:, None]).min(axis=1)
    return minima


def _grams(row: Keys, size: int) -> Keys:
    if len(row) < size:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(row, size)
    weights = mix(np.arange(1, size + 1, dtype=np.uint64)) | np.uint64(1)
    with np.errstate(over="ignore"):
        grams: Keys = mix((mix(windows) * weights).sum(axis=1, dtype=np.uint64))
    return grams
