"""The rules: frozen settings and what they have counted so far, metrics in, a verdict out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rein.types import Action, Metrics, Verdict


@dataclass(slots=True)
class NotFinite:
    """Skips an update whose loss or gradient is not finite; stops after `max_skips` of one role in a row."""

    max_skips: int
    skips: dict[str, int] = field(default_factory=dict)  # role, the `critic` of `critic/vf_loss` -> how many

    def __call__(self, metrics: Metrics) -> Verdict:
        watched = [name for name in metrics if name.endswith(("grad_norm", "loss"))]
        bad = [name for name in watched if not math.isfinite(metrics[name])]
        if not bad:
            self.skips |= {name.partition("/")[0]: 0 for name in watched}
            return Verdict()
        role = bad[0].partition("/")[0]
        skips = self.skips[role] = self.skips.get(role, 0) + 1
        reason = f"{bad[0]} is {metrics[bad[0]]}"
        if skips >= self.max_skips:
            return Verdict(
                Action.STOP,
                f"{reason}, {skips} updates in a row; lower the learning rate or check the rewards",
            )
        return Verdict(Action.SKIP, reason)
