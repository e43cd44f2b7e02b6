"""TOPR: made for stored data. Good responses are imitated as they are, bad ones only while the actor still
gives them as much probability as the policy that wrote them."""

import math

from torch import Tensor

from rein.functional.losses.result import PolicyLoss, result, weighted
from rein.functional.masked import counted, masked_sum


def topr(
    log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]  who wrote the responses
    advantages: Tensor,  # [B, T]
    weights: Tensor | None,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    ratio_max: float = 1.0,
) -> PolicyLoss:
    """-A log pi where A >= 0; -sg(min(w, ratio_max)) A log pi where A < 0, w = prod_t pi / mu of the
    response.

    arXiv:2503.14286, section 3. Bounded from below without any KL. The ratio is that of whole responses: give
    rows uncut. Nothing counts as clipped: a bad response at the bound is where it was written, not far off.
    """
    log_probs, behavior_log_probs, advantages = counted(mask, log_probs, behavior_log_probs, advantages)
    log_ratio = log_probs - behavior_log_probs
    row = masked_sum(log_ratio.detach(), mask, 1).unsqueeze(1)
    limit = math.log(ratio_max)
    negative = advantages < 0
    losses = -advantages * log_probs * row.clamp(max=limit).exp().where(negative, 1)
    return result(weighted(losses, weights, mask), log_ratio)
