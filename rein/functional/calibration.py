"""Whether tokens look as if a policy had sampled them, at which temperature, and with which part cut off.

R positions by V vocabulary entries; p = softmax(z / T), a the stored token. Needs the logits of whoever is
held to be the sampler. What the numbers mean is decided elsewhere.
"""

import torch
from torch import Tensor

from rein.functional.log_probs import entropy_of, log_probs_of


def above(
    logits: Tensor,  # [R, V]
    ids: Tensor,  # [R]
    temperature: Tensor,  # [R]
) -> Tensor:
    """sum of p over the tokens likelier than a -> [R]: a nucleus of top_p holds a only where this is < top_p.

    arXiv:1904.09751, section 3.1.
    """
    p = torch.softmax(logits.float() / temperature.float().unsqueeze(-1), -1)
    chosen = p.gather(-1, ids.unsqueeze(-1))
    return p.where(p > chosen, 0).sum(-1)


def chance_beyond(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R]
    cuts: Tensor,  # [C]
) -> Tensor:
    """The chance that a token sampled without a cut has `above` >= cut -> [C, R]; about 1 - cut, or less."""
    p = torch.softmax(logits.float() / temperature.float().unsqueeze(-1), -1).sort(-1, descending=True).values
    above_each = p.cumsum(-1) - p
    return torch.stack([p.where(above_each >= cut, 0).sum(-1) for cut in cuts])


def surprise(
    logits: Tensor,  # [R, V]
    ids: Tensor,  # [R]
    temperature: Tensor,  # [R]
) -> Tensor:
    """-log p(a) - H(p) -> [R], nats: 0 on the mean where p sampled a, below it where a colder policy did."""
    return -log_probs_of(logits, ids, temperature) - entropy_of(logits, temperature)
