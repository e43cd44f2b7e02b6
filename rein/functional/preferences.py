"""Losses and statistics of preference pairs: scores of chosen and rejected responses, [B] each."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(
    chosen: Tensor,  # [B]
    rejected: Tensor,  # [B]
    margin: Tensor | None = None,  # [B]
) -> Tensor:
    """-log sigmoid(s_chosen - s_rejected - margin) per pair, [B].

    arXiv:2203.02155, eq. 1; margin: arXiv:2307.09288, eq. 2.
    """
    gap = chosen - rejected
    return -logsigmoid(gap if margin is None else gap - margin)


@torch.no_grad()
def pair_statistics(chosen: Tensor, rejected: Tensor) -> dict[str, float]:
    """Share of pairs ranked right, ties apart, and the mean margin s_chosen - s_rejected."""
    gap = (chosen - rejected).double()
    return {
        "accuracy": (gap > 0).double().mean().item(),
        "ties": (gap == 0).double().mean().item(),
        "margin": gap.mean().item(),
    }
