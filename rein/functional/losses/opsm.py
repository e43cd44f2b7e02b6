"""Off-policy sequence masking: bad responses that the actor has left behind teach nothing more."""

import torch
from torch import Tensor

from rein.functional.masked import counted, masked_mean


@torch.no_grad()
def opsm_mask(
    log_probs: Tensor,  # [B, T]  actor
    behavior_log_probs: Tensor,  # [B, T]  who wrote the responses
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    threshold: float,  # nats per token
) -> Tensor:
    """False where A < 0 and mean_t log(mu / pi) of the response > threshold, [B, T] bool; else the mask.

    DeepSeek-V3.2 (arXiv:2512.02556), eq. 9. It goes to any loss as weights of 0 and 1: what it drops stays in
    the denominator.
    """
    log_probs, behavior_log_probs = counted(mask, log_probs, behavior_log_probs)
    distance = masked_mean(behavior_log_probs - log_probs, mask, 1).unsqueeze(1)
    return mask & ~((advantages < 0) & (distance > threshold))
