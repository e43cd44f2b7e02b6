"""What generated answers look like, from their ids alone. Knows nothing of text or models."""

import torch
from torch import Tensor


def repetition(
    ids: Tensor,  # [T]
    *,
    n: int = 4,
) -> float:
    """Share of the n-grams of `ids` that stood there before: 1 - distinct / all.

    0 for an answer that never repeats four tokens, near 1 for a loop, 0 for one shorter than n. Welleck et
    al. 2020 (arXiv:1908.04319), seq-rep-n.
    """
    if len(ids) < n:
        return 0.0
    grams = ids.unfold(0, n, 1)
    return 1 - len(torch.unique(grams, dim=0)) / len(grams)


def wins(
    before: Tensor,  # [N]
    after: Tensor,  # [N], the same problems in the same order
) -> Tensor:
    """1 where `after` is higher, 1/2 where they tie, 0 where it is lower, [N]: their mean is the win rate."""
    return (after > before).double() + (after == before).double() / 2
