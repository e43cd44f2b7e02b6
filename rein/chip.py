"""What the CPU has. Reads /proc; knows no torch."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def has_tiles() -> bool:
    """Whether it multiplies bfloat16 tiles (AMX): matrix products at several times float32's rate."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "amx_bf16" in flags.read_text()
