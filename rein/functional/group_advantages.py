"""Advantages of a response against the others of its prompt: no critic.

B rows by T positions; `groups` holds the number of each row's prompt, rows in any order. A row's reward is
the sum of its counted token rewards. A row alone in its group has nothing to stand against: its advantage is
its reward, as in verl. Advantages are the same at every counted token of a row and 0 elsewhere. Statistics
are two-pass and in float64; rounding between equal rewards counts as no spread.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.masked import masked_sum


class Groups(NamedTuple):
    """Rewards and their group's numbers, read at each row; all [B], float64."""

    scores: Tensor
    mean: Tensor
    std: Tensor  # of the sample; 0 for a row alone and where there is no spread
    size: Tensor
    group: Tensor  # [B] long, 0 .. number of groups - 1


def _sums(values: Tensor, index: Tensor) -> Tensor:
    """Sum over a row's group, read at the row."""
    totals = torch.zeros(len(values), dtype=values.dtype, device=values.device)
    return totals.index_add_(0, index, values)[index]


def _grouped(token_level_rewards: Tensor, response_mask: Tensor, groups: Tensor) -> Groups:
    scores = masked_sum(token_level_rewards, response_mask, 1)
    index = torch.unique(groups, return_inverse=True)[1]
    # Equal rewards may differ by a few ulp once they are spread over tokens.
    floor = torch.finfo(scores.dtype).eps * 8 * scores.abs()
    scores = scores.double()
    size = _sums(torch.ones_like(scores), index)
    mean = _sums(scores, index) / size
    deviation = (scores - mean).where((scores - mean).abs() > floor, 0)
    std = (_sums(deviation.square(), index) / (size - 1).clamp(min=1)).sqrt()
    return Groups(mean + deviation, mean, std, size, index)


def _spread_out(rows: Tensor, like: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """[B] -> advantages and returns, [B, T] each: with no critic they are the same."""
    found = rows.to(like.dtype).unsqueeze(1).expand(mask.shape).where(mask, 0)
    return found, found


@torch.no_grad()
def grpo(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    groups: Tensor,  # [B]  long
    *,
    by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """(R - mean) / (std + 1e-6) over the group (arXiv:2402.03300, section 4.1.2).

    `by_std=False` leaves the division out (arXiv:2503.20783, Dr. GRPO).
    """
    g = _grouped(token_level_rewards, response_mask, groups)
    alone = g.size == 1
    rows = g.scores - g.mean.where(~alone, 0)
    if by_std:
        rows = rows / (g.std.where(~alone, 1) + 1e-6)
    return _spread_out(rows, token_level_rewards, response_mask)


@torch.no_grad()
def rloo(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    groups: Tensor,  # [B]  long
) -> tuple[Tensor, Tensor]:
    """R - mean of the group's others = (R - mean) n / (n - 1) (Kool et al. 2019; arXiv:2402.14740)."""
    g = _grouped(token_level_rewards, response_mask, groups)
    rows = ((g.scores - g.mean) * g.size / (g.size - 1).clamp(min=1)).where(g.size > 1, g.scores)
    return _spread_out(rows, token_level_rewards, response_mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    groups: Tensor,  # [B]  long
) -> tuple[Tensor, Tensor]:
    """R - mean of the group; the caller whitens over the batch (arXiv:2501.03262, its baseline form)."""
    g = _grouped(token_level_rewards, response_mask, groups)
    rows = g.scores - g.mean.where(g.size > 1, 0)
    return _spread_out(rows, token_level_rewards, response_mask)


@torch.no_grad()
def opo(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    groups: Tensor,  # [B]  long
) -> tuple[Tensor, Tensor]:
    """R - sum(length R) / sum(length) over the group (arXiv:2505.23585, the optimal baseline)."""
    g = _grouped(token_level_rewards, response_mask, groups)
    lengths = response_mask.sum(1).double()
    baseline = _sums(lengths * g.scores, g.group) / _sums(lengths, g.group).clamp(min=1)
    rows = g.scores - baseline.where(g.size > 1, 0)
    rows = rows.where((g.std > 0) | (g.size == 1), 0)
    return _spread_out(rows, token_level_rewards, response_mask)


@torch.no_grad()
def win_rate(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    groups: Tensor,  # [B]  long
    *,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """P - 1/2, P = mean over the group of sigmoid((R_i - R_j) / scale), the row itself among them.

    The target of losses/sppo.py (arXiv:2405.00675, with Bradley-Terry wins); 0 for a row alone.
    """
    g = _grouped(token_level_rewards, response_mask, groups)
    same = g.group.unsqueeze(1) == g.group.unsqueeze(0)
    wins = torch.sigmoid((g.scores.unsqueeze(1) - g.scores.unsqueeze(0)) / scale)
    rows = wins.where(same, 0).sum(1) / g.size - 0.5
    return _spread_out(rows, token_level_rewards, response_mask)
