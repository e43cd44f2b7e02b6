"""The precision of this process's float32 matrix products.

On a CPU "medium" hands them to oneDNN, "highest" keeps them with the BLAS that torch carries. Large ones are
the quicker for it on AMD; attention's kernels, which make theirs tile by tile, are two to eight times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside, float32 matrix products of this process are of this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
