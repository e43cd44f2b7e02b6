"""Logits in; log-probs of chosen tokens, entropies and exact divergences out. Always float32 or wider.

R positions by V vocabulary entries. Knows nothing of models: models/ calls these chunk by chunk.
"""

import torch
from torch import Tensor


def _scaled(logits: Tensor, temperature: Tensor | None) -> Tensor:
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return wide if temperature is None else wide / temperature.unsqueeze(-1)


def log_probs_of(
    logits: Tensor,  # [R, V]
    ids: Tensor,  # [R]
    temperature: Tensor | None = None,  # [R], > 0
) -> Tensor:
    """log softmax(z / T)[id] -> [R]."""
    scaled = _scaled(logits, temperature)
    return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, -1)


def entropy_of(
    logits: Tensor,  # [R, V]
    temperature: Tensor | None = None,  # [R]
) -> Tensor:
    """H = logsumexp(z) - sum softmax(z) z, z = logits / T -> [R], nats; a logit of -inf is probability 0."""
    scaled = _scaled(logits, temperature)
    p = torch.softmax(scaled, -1)
    return torch.logsumexp(scaled, -1) - (p * scaled.where(p > 0, 0)).sum(-1)


def exact_kl(
    logits: Tensor,  # [R, V]  of the distribution the mean is taken under
    ref_logits: Tensor,  # [R, V]
    temperature: Tensor | None = None,  # [R]
) -> Tensor:
    """KL(p || q) = sum p (log p - log q) over the vocabulary -> [R], nats, never negative."""
    log_p = torch.log_softmax(_scaled(logits, temperature), -1)
    log_q = torch.log_softmax(_scaled(ref_logits, temperature), -1)
    p = log_p.exp()
    return (p * (log_p - log_q).where(p > 0, 0)).sum(-1).clamp(min=0)
