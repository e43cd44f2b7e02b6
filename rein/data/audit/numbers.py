"""Arrays in, JSON-able facts about them out: a distribution, a correlation with its interval."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 40
FEW = 24  # so many different values are counted one by one
Fact = dict[str, Any]


def distribution(values: NDArray[Any]) -> Fact | None:
    """n, mean, std, min, max, quantiles p1..p99, distinct, histogram{edges, counts, open}; None of nothing.

    Bins are equally wide up to a little above p99; where the longest tail goes far beyond, the last bin is
    `open` and holds it. Of few different values `values` counts each.
    """
    if not len(values):
        return None
    values = np.asarray(values, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    at = dict(
        zip((f"p{round(100 * q)}" for q in QUANTILES), np.quantile(values, QUANTILES).tolist(), strict=True)
    )
    distinct, counts = np.unique(values, return_counts=True)
    with np.errstate(over="ignore"):
        spread = float(values.std())
    found: Fact = {
        "n": len(values),
        "mean": float(values.mean()),
        "std": spread if math.isfinite(spread) else None,
    }
    found |= {"min": low, "max": high, **at, "distinct": len(distinct)}
    found["histogram"] = _histogram(values, low, high, at["p99"])
    if len(distinct) <= FEW:
        found["values"] = [[v, c] for v, c in zip(distinct.tolist(), counts.tolist(), strict=True)]
    return found


def _histogram(values: NDArray[np.float64], low: float, high: float, p99: float) -> Fact:
    top = p99 + 0.1 * (p99 - low)
    is_open = high > low + 1.5 * (top - low) and top > low
    top = top if is_open else high
    whole = bool((values[:1000] % 1 == 0).all())
    width = (top - low) / BINS
    if whole and width < 2**40:
        width = max(1.0, math.ceil(width))
    if not width or not math.isfinite(width):
        return {"edges": [low, high], "counts": [len(values)], "open": False}
    bins = max(1, min(BINS, math.ceil((top - low) / width + (1e-9 if whole else 0))))
    bins += whole and low + bins * width <= top  # the last whole number needs a bin of its own
    edges = low + width * np.arange(bins + 1)
    counts, _ = np.histogram(np.minimum(values, edges[-1]), edges)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "open": is_open}


def correlation(first: NDArray[Any], second: NDArray[Any]) -> Fact | None:
    """Pearson's r with its 95 % interval (Fisher's z, Cox and Hinkley 1974); None where there is none."""
    n = len(first)
    if n < 4:
        return None
    a, b = (np.asarray(v, dtype=np.float64) for v in (first, second))
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = a - a.mean(), b - b.mean()
        scale = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    if not scale or not math.isfinite(scale):
        return None
    r = max(-1.0, min(1.0, float(a @ b) / scale))
    z, half = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, r))), 1.96 / math.sqrt(n - 3)
    return {"n": n, "r": r, "low": math.tanh(z - half), "high": math.tanh(z + half)}


def share(part: int | float, whole: int | float) -> float | None:
    return float(part) / float(whole) if whole else None
