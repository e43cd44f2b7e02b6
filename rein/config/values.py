"""The kinds of values that a recipe's keys take: counts, rates, shares, paths, and the bounds of each.

Bounds keep out what no machine could mean (a count beyond 2**31 - 1, a number float32 cannot hold).
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rein.config.names import TRACKERS
from rein.functional.presets import weight_bounds

MOST = 2**31 - 1  # of anything that is counted
MOST_THREADS, MOST_PPO_EPOCHS = 4096, 10_000
HIGHEST = 1e30  # numbers that float32 computes with
LONGEST_NAME, LONGEST_PATH = 255, 4000  # bytes; the path leaves room for the names of what is written


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def ordered(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError(f"lower end {ends[0]} is not below upper end {ends[1]}")
    return ends


def place(value: str | None) -> str | None:
    """The form of a path, whether or not there is such a file; None passes."""
    if value is None:
        return None
    if not value:
        raise ValueError("is empty")
    if "\0" in value:
        raise ValueError("holds a zero byte, which no path does")
    longest = max(len(os.fsencode(part)) for part in value.split("/"))
    if longest > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
        raise ValueError(
            f"is longer than a file system takes ({LONGEST_NAME} bytes a name, {LONGEST_PATH} in all)"
        )
    try:
        Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home folder {value.partition('/')[0]}") from error
    return value


def weight_bounds_ok(threshold: float | str) -> float | str:
    weight_bounds(threshold)
    return threshold


def rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    starts = [start for start, _ in points]
    if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
        raise ValueError("points must begin at progress 0 and rise, as in [[0, 0.08], [0.2, 0.05]]")
    return points


def expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression ({error})") from error
    return text


def tracker(name: str) -> str:
    """A name of the table, or the user's `pkg.mod:name`, as a Literal would say it."""
    if name not in TRACKERS and ":" not in name:
        known = ", ".join((*TRACKERS, "pkg.mod:name"))
        raise PydanticCustomError("literal_error", "unknown", {"expected": known})
    return name


Place = Annotated[str, AfterValidator(place)]
MaybePlace = Annotated[str | None, AfterValidator(place)]
TrackerName = Annotated[str, AfterValidator(tracker)]
Files = Annotated[list[Place], BeforeValidator(as_list)]
Positive = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
PpoEpochs = Annotated[int, Field(gt=0, le=MOST_PPO_EPOCHS)]  # over one batch
Every = Annotated[int, Field(ge=-1, le=MOST)]  # so many steps; -1: never
Above = Annotated[float, Field(gt=0, le=HIGHEST)]
Rate = Annotated[float, Field(ge=0, le=HIGHEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Schedule = Annotated[list[tuple[Share, Rate]], AfterValidator(rising)]
