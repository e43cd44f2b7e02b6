"""All rules on one set of metrics: which fired, the gravest first."""

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


def decide(rules: Sequence[Guard], metrics: Metrics) -> list[Verdict]:
    """Ask every rule, so that each keeps count; the verdicts of those that fired, the gravest first.

    A rule that raises stops the run.
    """
    found = [verdict for rule in rules if (verdict := rule(metrics)) is not None]
    return sorted(found, key=lambda verdict: -GRAVITY.index(verdict.action))
