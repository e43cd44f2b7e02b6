"""How sure a number is: bootstrap and Wilson intervals, explained variance, pass@k. All in float64, all
seeded.

N problems. Scores are `[N]`, one per problem. Knows nothing of models or files.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.masked import masked_var

RESAMPLES = 10_000
DRAWS_AT_ONCE = 1 << 20  # bounds the memory of a chunk of resamples


class Interval(NamedTuple):
    """Both ends belong to it."""

    low: float
    high: float


def paired_bootstrap(
    before: Tensor,  # [N]
    after: Tensor,  # [N], the same problems in the same order
    *,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Percentile interval of mean(after - before) when whole problems are drawn with replacement.

    Efron and Tibshirani (1993), An Introduction to the Bootstrap, section 13.3. Raises ValueError for no
    problem at all, or sides of different length.
    """
    if before.shape != after.shape or before.dim() != 1 or len(before) == 0:
        raise ValueError(
            f"paired_bootstrap: shapes {before.shape} and {after.shape}; give one score per problem"
        )
    difference = (after.double() - before.double()).cpu()
    generator = torch.Generator().manual_seed(seed)
    chunk = max(1, DRAWS_AT_ONCE // len(difference))
    means = []
    for start in range(0, resamples, chunk):
        size = (min(chunk, resamples - start), len(difference))
        drawn = torch.randint(len(difference), size, generator=generator)
        means.append(difference[drawn].mean(1))
    tail = (1 - confidence) / 2
    ends = torch.quantile(torch.cat(means), torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(float(ends[0]), float(ends[1]))


def ratio_of_sums(
    sums: Tensor,  # [N], a sum over each row's tokens
    counts: Tensor,  # [N], how many
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, Interval]:
    """sum / count over all tokens, and its 95 % interval when whole rows are drawn with replacement.

    Tokens of one row are not independent, so rows are what is drawn. Raises ValueError for no token at all.
    """
    sums, counts = sums.double().cpu(), counts.double().cpu()
    if counts.sum() == 0:
        raise ValueError("ratio_of_sums: no token is counted")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(sums), (resamples, len(sums)), generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1).clamp(min=1)
    ends = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return (sums.sum() / counts.sum()).item(), Interval(float(ends[0]), float(ends[1]))


def wilson(successes: float, n: int, *, z: float = 1.959963984540054) -> Interval:
    """Score interval of a proportion: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n).

    Wilson (1927). Holds at 0 and at n successes, where the normal interval has no width; [0, 1] for n = 0.
    """
    if n == 0:
        return Interval(0.0, 1.0)
    share, scale = successes / n, 1 + z * z / n
    center = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return Interval(max(0.0, center - half), min(1.0, center + half))


def explained_variance(
    values: Tensor,  # [B, T]
    returns: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
) -> float:
    """1 - var(R - V) / (var(R) + 1e-5) over the tokens that count, as verl's `critic/vf_explained_var`.

    1 is a perfect critic, 0 one that says the mean, below 0 worse than that.
    """
    values, returns = values.double(), returns.double()
    unexplained = masked_var(returns - values, mask)
    return float(1 - unexplained / (masked_var(returns, mask) + 1e-5))


def pass_at_k(
    correct: Tensor,  # [N], right answers among the n of each problem
    n: int,
    k: int,
) -> Tensor:
    """1 - C(n - c, k) / C(n, k), [N]: the chance that k of a problem's n answers hold a right one, without
    bias.

    Chen et al. 2021 (arXiv:2107.03374), equation 1, as the product over i = n-c+1 .. n of (1 - k / i).
    """
    if not 0 < k <= n:
        raise ValueError(f"pass_at_k: k={k} of n={n}; k must lie between 1 and n")
    index = torch.arange(1, n + 1, dtype=torch.float64)
    factors = (1 - k / index).where(index > n - correct.double()[:, None], 1)
    # i < k only enters where n - c < k: then no draw of k is all wrong.
    return (1 - factors.prod(1)).where(n - correct >= k, 1.0)
