"""SPPO: the log-ratio to the reference is pulled towards a response's centred, scaled win probability."""

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, on_tokens, result
from rein.functional.masked import counted, masked_mean, masked_sum


def sppo(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]  P(wins against its group) - 1/2 at each token; estimator `win_rate`
    weights: Tensor | None,  # [B, T]  their mean weighs the response
    mask: Tensor,  # [B, T]
    *,
    eta: float = 1000.0,
) -> PolicyLoss:
    """(sum_t log pi / ref - eta (P - 1/2))^2 per response (arXiv:2405.00675, algorithm 1).

    The loss of a response stands at each of its tokens: for `seq-mean-token-mean` only.
    """
    log_probs, ref_log_probs, advantages = counted(mask, log_probs, ref_log_probs, advantages)
    log_ratio = log_probs - ref_log_probs
    losses = (masked_sum(log_ratio, mask, 1) - eta * masked_mean(advantages, mask, 1)).square()
    if weights is not None:
        losses = losses * masked_mean(weights, mask, 1)
    return result(on_tokens(losses, mask), log_ratio)
