"""The rules: frozen settings and what they have counted so far, metrics in, a verdict out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rein.types import Action, Metrics, Verdict


@dataclass(slots=True)
class NotFinite:
    """Skips an update whose loss or gradient is not finite; stops after `max_skips` in a row."""

    max_skips: int
    skips: int = 0

    def __call__(self, metrics: Metrics) -> Verdict:
        bad = [
            name
            for name, value in metrics.items()
            if name.endswith(("grad_norm", "loss")) and not math.isfinite(value)
        ]
        if not bad:
            self.skips = 0
            return Verdict()
        self.skips += 1
        reason = f"{bad[0]} is {metrics[bad[0]]}"
        if self.skips >= self.max_skips:
            return Verdict(
                Action.STOP,
                f"{reason}, {self.skips} updates in a row; lower the learning rate or check the rewards",
            )
        return Verdict(Action.SKIP, reason)
