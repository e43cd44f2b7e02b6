"""Learning-rate multipliers over optimizer steps, 0 up to `total` - 1."""

import math


def lr_multiplier(step: int, *, total: int, kind: str, warmup: int, min_ratio: float) -> float:
    """Linear warm-up over `warmup` steps, then constant 1, or a half cosine to `min_ratio` at the last step.

    cosine: min + (1 - min) (1 + cos(pi p)) / 2, p = (step - warmup) / (total - 1 - warmup). The first warm-up
    step already moves: (step + 1) / warmup.
    """
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    span = max(total - 1 - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
