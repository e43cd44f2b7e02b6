"""DPO: preference pairs, without a reward model or a critic. P pairs; chosen and rejected padded apart."""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from rein.functional.masked import masked_mean, masked_sum


class PairLoss(NamedTuple):
    """Losses and what is logged of them, per pair; all [P]."""

    losses: Tensor
    right: Tensor  # the implicit reward ranks the pair right
    margin: Tensor  # beta times the difference of the log-ratios
    nll: Tensor  # of the chosen response, per token


def dpo(
    chosen_log_probs: Tensor,  # [P, T]
    rejected_log_probs: Tensor,  # [P, U]
    ref_chosen_log_probs: Tensor,  # [P, T]
    ref_rejected_log_probs: Tensor,  # [P, U]
    chosen_mask: Tensor,  # [P, T]
    rejected_mask: Tensor,  # [P, U]
    *,
    beta: float = 0.1,
    nll_coef: float = 0.0,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """-log sigmoid(beta (log pi/ref chosen - log pi/ref rejected)) + nll_coef NLL(chosen) per token, per
    pair.

    arXiv:2305.18290, eq. 7; the NLL term: arXiv:2404.19733, eq. 1. With label smoothing e, (1 - e) of this
    and e of the pair turned round (Mitchell 2023, conservative DPO).
    """
    won = masked_sum(chosen_log_probs - ref_chosen_log_probs, chosen_mask, 1)
    lost = masked_sum(rejected_log_probs - ref_rejected_log_probs, rejected_mask, 1)
    margin = beta * (won - lost)
    nll = -masked_mean(chosen_log_probs, chosen_mask, 1)
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    if nll_coef:
        losses = losses + nll_coef * nll
    right = margin.detach() > 0
    return PairLoss(losses, right, margin.detach(), nll.detach())


PAIR_LOSSES = {"dpo": dpo}
