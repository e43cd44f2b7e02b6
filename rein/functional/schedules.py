"""What changes over a run: learning-rate multipliers over optimizer steps, coefficients over progress."""

import math
from collections.abc import Sequence
from itertools import pairwise

SHAPES = ("pieces", "linear", "smooth")


def lr_multiplier(
    step: int,  # 0 up to total - 1
    *,
    total: int,
    kind: str,
    warmup: int,
    min_ratio: float,
    stable_ratio: float = 0.9,
) -> float:
    """Linear warm-up over `warmup` steps, then constant 1, or a half cosine to `min_ratio` at the last step.

    cosine: min + (1 - min) (1 + cos(pi p)) / 2, p = (step - warmup) / (total - 1 - warmup). wsd (warm-up,
    stable, decay: arXiv:2404.06395, section 4): 1 for `stable_ratio` of the steps after warm-up, then the
    cosine. The first warm-up step already moves: (step + 1) / warmup. Raises ValueError for an unknown kind.
    """
    if kind not in ("constant", "cosine", "wsd"):
        raise ValueError(f"lr_multiplier: kind {kind!r} is unknown; known: constant, cosine, wsd")
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    span = max(total - 1 - warmup, 1)
    stable = int(span * stable_ratio) if kind == "wsd" else 0
    progress = (step - warmup - stable) / max(span - stable, 1)
    return min_ratio + (1 - min_ratio) * _half_cosine(progress)


def over_progress(
    progress: float,  # share of the run that is done, 0 to 1
    points: Sequence[tuple[float, float]],  # (from this progress on, this value); the first at 0
    *,
    shape: str,
) -> float:
    """A coefficient that is scheduled over the run, in pieces or from point to point.

    pieces: [(0, .08), (.2, .05), (.8, .06)] is .08 for the first 20 %, then .05, the last 20 % at .06.
    linear and smooth (a half cosine) pass through the points: [(0, .005), (1, .001)] decays from the first to
    the second; after the last point its value stays.

    Raises ValueError for points that do not start at 0 or do not rise, and for an unknown shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"over_progress: shape {shape!r} is unknown; known: {', '.join(SHAPES)}")
    starts = [start for start, _ in points]
    if not points or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise ValueError(f"over_progress: {list(points)} must start at progress 0 and rise")
    progress = min(max(progress, 0.0), 1.0)
    last = max(i for i, start in enumerate(starts) if start <= progress)
    start, value = points[last]
    if shape == "pieces" or last == len(points) - 1:
        return value
    end, target = points[last + 1]
    part = (progress - start) / (end - start)
    left = 1 - part if shape == "linear" else _half_cosine(part)
    return target + (value - target) * left


def _half_cosine(progress: float) -> float:
    """1 at 0, falling to 0 at 1; flat outside."""
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
