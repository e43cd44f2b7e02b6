"""Lists of numbers and texts in, one 64-bit key each out: equal content, equal key, in every run and file.

A key is the sum of mix(value) * weight(place), mixed with the length: a multilinear hash, whose keys of
different content are equal with a chance of about 2**-64 a pair. Knows no column.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Offsets = NDArray[np.int64]  # [n + 1]: row i is values[offsets[i] : offsets[i + 1]]

NONE = np.uint64(0)  # the key of what is not there
BLOCK = 1 << 16  # values worked on at a time: what lies in the processor's cache
_PLACES = 1 << 16
_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
_WEIGHTS: Keys = np.random.Generator(np.random.PCG64(7)).integers(1, 2**64, _PLACES, np.uint64) | np.uint64(1)


def mix(values: Keys) -> Keys:
    """A bijection of 64-bit numbers that leaves no pattern."""
    with np.errstate(over="ignore"):
        mixed = values * _A
        mixed ^= mixed >> np.uint64(32)
        mixed *= _B
        mixed ^= mixed >> np.uint64(29)
    return mixed


def list_keys(values: NDArray[Any], offsets: Offsets) -> Keys:
    """The key of each list; `values` are integers."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    sums = np.zeros(len(lengths), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    heads = starts[filled]
    far = bool(filled.size) and int(lengths.max()) > _PLACES
    with np.errstate(over="ignore"):
        for begin in range(int(offsets[0]), int(offsets[-1]), BLOCK):
            end = min(begin + BLOCK, int(offsets[-1]))
            first, last = np.searchsorted(heads, (begin, end - 1), side="right")
            rows = filled[first - 1 : last]
            cuts = np.maximum(heads[first - 1 : last], begin) - begin
            inside = np.diff(cuts, append=end - begin)
            place = np.arange(begin, end) - np.repeat(starts[rows], inside)
            weighed = values[begin:end].astype(np.uint64)
            weighed *= _A
            weighed ^= weighed >> np.uint64(32)
            if far:
                weighed *= _WEIGHTS[place % _PLACES] + (place // _PLACES).astype(np.uint64) * _C
            else:
                weighed *= _WEIGHTS[place]
            sums[rows] += np.add.reduceat(weighed, cuts)
        return _there(mix(sums + lengths.astype(np.uint64) * _C))


def pair_keys(first: Keys, second: Keys) -> Keys:
    """One key of two, in this order."""
    with np.errstate(over="ignore"):
        return _there(mix(first * _C + mix(second)))


def _there(keys: Keys) -> Keys:
    """Never the key of what is not there."""
    keys[keys == NONE] = np.uint64(1)
    return keys
