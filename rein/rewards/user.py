"""The user's own function as a reward, called the way verl calls `compute_score`.

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict

by keyword, once per row; the recipe's options follow as further keywords. `solution_str` is the response's
text, without stop tokens. A dict holds the number under "score". None means that the row cannot be scored.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import chdir
from typing import Any, SupportsFloat

from rein.errors import ConfigError, UserCodeError
from rein.protocols import Reward
from rein.rewards.per_row import per_row
from rein.types import Trajectory

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def user_reward(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Reward:
    """The reward that calls `function`.

    Raises ConfigError at once where the function does not take the arguments; UserCodeError (exit code 8)
    where it raises or returns what is no finite number.
    """
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **options)
    except TypeError as error:
        raise ConfigError(
            f"reward {name}: {error}; it is called with {', '.join([*ARGUMENTS, *options])} by keyword"
        ) from error

    def score(row: Trajectory) -> float | None:
        try:
            with chdir("."):  # wherever the function goes, the run stays where it is
                result = function(
                    data_source=row.data_source,
                    solution_str=row.response,
                    ground_truth=row.ground_truth,
                    extra_info=dict(row.extra_info),
                    **options,
                )
        except (Exception, SystemExit) as error:
            raise UserCodeError(
                f"reward {name}: raised {type(error).__name__} ({error}) for {row.where}; mend the function"
            ) from error
        return _number(result, name, row)

    return per_row(score)


def _number(result: Any, name: str, row: Trajectory) -> float | None:
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise UserCodeError(f'reward {name}: returned a dict without "score" for {row.where}; add it')
        value = result["score"]
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except Exception as error:  # an array's or tensor's, each of its own kind
        raise UserCodeError(
            f"reward {name}: returned a {type(value).__name__} that is no number ({error}) for {row.where}; "
            "return a number, or None to skip"
        ) from error
    if not math.isfinite(number):
        raise UserCodeError(
            f"reward {name}: returned {value!r} for {row.where}; return a finite number, or None to skip"
        )
    return number
