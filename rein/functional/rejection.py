"""Rejection: tokens or whole rows that are too far from who wrote them leave the loss's mask.

The distance is measured on z = old - behavior: k1 = -z, k2 = z^2 / 2, k3 = e^z - 1 - z, at each token, or as
the sum, mean or largest of a row. Names and threshold rules are verl's (presets.py parses them).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.masked import LOG_RATIO_CLAMP, counted, masked_mean, masked_sum
from rein.functional.presets import rejection_bounds


class Criterion(NamedTuple):
    """One rule applied: its statistic, its bounds in the statistic's unit, and what it keeps."""

    name: str
    statistic: Tensor  # [B, T]; of a row rule, the row's number at each position
    per_row: Tensor | None  # [B] of a row rule
    low: float | None
    high: float
    kept: Tensor  # [B, T] bool, read where the mask is True


@torch.no_grad()
def criteria(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    names: str,
    threshold: float | str | None,
) -> list[Criterion]:
    """Each rule of `names`, applied. z is clamped at +-20.

    A k1 rule keeps log lo <= k1 <= log hi, so its bounds are on behavior / old; k2 and k3 rules keep what is
    not above their bound. Raises ValueError as presets.rejection_bounds does.
    """
    old_log_probs, behavior_log_probs = counted(mask, old_log_probs, behavior_log_probs)
    z = (old_log_probs - behavior_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    distances = {"k1": -z, "k2": 0.5 * z.square(), "k3": z.exp() - 1 - z}
    found = []
    for name, (low, high) in rejection_bounds(names, threshold).items():
        level, _, kind = name.rpartition("_")
        if kind == "k1":
            low, high = None if low is None else math.log(low), math.log(high)
        statistic, per_row = distances[kind], None
        if level != "token":
            per_row = _of_rows(statistic, mask, level)
            statistic = per_row.unsqueeze(1).expand_as(statistic)
        kept = statistic <= high
        if low is not None:
            kept = kept & (statistic >= low)
        found.append(Criterion(name, statistic, per_row, low, high, kept))
    return found


def _of_rows(values: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "seq_sum":
        return masked_sum(values, mask, 1)
    if level == "seq_mean":
        return masked_mean(values, mask, 1)
    lowest = values.where(mask, -torch.inf).amax(1)
    return lowest.where(mask.any(1), 0)
