"""Rules about the form of a response: does it match a pattern, how long is it. Need no ground truth."""

import re

from rein.errors import ConfigError
from rein.protocols import Reward
from rein.rewards.per_row import per_row
from rein.types import Trajectory


def format(*, pattern: str, match: str = "full", ignore_case: bool = False) -> Reward:
    """1 where the response matches the regular expression `pattern`, else 0.

    match `full`: the whole response, white space around it aside; `search`: anywhere in it. A dot matches
    newlines too. Raises ConfigError for a pattern that is no regular expression.
    """
    if match not in ("full", "search"):
        raise ConfigError(f"reward format: match={match!r}; give full or search")
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as error:
        raise ConfigError(
            f"reward format: pattern {pattern!r} is no regular expression ({error}); correct it"
        ) from error

    def score(row: Trajectory) -> float:
        found = compiled.fullmatch(row.response.strip()) if match == "full" else compiled.search(row.response)
        return float(found is not None)

    return per_row(score)


def length(
    *,
    target: int = 0,
    slope: float = -0.01,
    offset: float = 0.0,
    lowest: float | None = None,
    highest: float | None = None,
) -> Reward:
    """offset + slope * max(0, tokens - target), kept within [lowest, highest].

    With a target: a penalty for each token over it. With target 0: a linear function of the length. Tokens
    are the response's counted ones (`response_mask`), its stop token among them.
    """
    if lowest is not None and highest is not None and lowest > highest:
        raise ConfigError(f"reward length: lowest={lowest} is above highest={highest}; swap them")

    def score(row: Trajectory) -> float:
        value = offset + slope * max(0, int(row.response_mask.sum()) - target)
        value = value if highest is None else min(value, highest)
        return value if lowest is None else max(value, lowest)

    return per_row(score)
