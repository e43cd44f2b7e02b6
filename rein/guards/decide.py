"""All rules on one set of metrics: the gravest verdict wins."""

from collections.abc import Sequence

from rein.protocols import Guard
from rein.types import Action, Metrics, Verdict

GRAVITY = [
    Action.CONTINUE,
    Action.SKIP,
    Action.STOP_EPOCHS,
    Action.ROLLBACK,
    Action.REFRESH,
    Action.PAUSE,
    Action.STOP,
]


def decide(rules: Sequence[Guard], metrics: Metrics) -> Verdict:
    """Ask every rule, so that each keeps count; the gravest answer wins. A rule that raises stops the run."""
    verdicts = [rule(metrics) for rule in rules]
    return max(verdicts, key=lambda verdict: GRAVITY.index(verdict.action), default=Verdict())
