"""What one core of this machine does at best: the rate of its matrix products, by which MFU divides."""

from __future__ import annotations

import functools
import time

import torch
from torch.nn.functional import linear

SECONDS = 0.1  # of one core, about
SIDES = (256, 512, 768)


@functools.cache
def core_flops(dtype: torch.dtype) -> float:
    """FLOP per CPU second of the quickest product of two matrices of this type, measured once in a process.

    At the process's own precision of float32 products; its random numbers are left alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return max(_rate(side, dtype) for side in SIDES)
    finally:
        torch.set_num_threads(threads)


def _rate(side: int, dtype: torch.dtype) -> float:
    x, weight = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    best, spent = float("inf"), 0.0
    while spent < SECONDS / len(SIDES):
        before = time.process_time()
        linear(x, weight)
        took = max(time.process_time() - before, 1e-9)
        best, spent = min(best, took), spent + took
    return 2.0 * side**3 / best
