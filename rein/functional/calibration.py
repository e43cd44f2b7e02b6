"""Whether tokens look as if a policy had sampled them, at which temperature, and with which part cut off.

R positions by V vocabulary entries; p = softmax(z / T), a the stored token. Needs the logits of whoever is
held to be the sampler. What the numbers mean is decided elsewhere.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rein.functional.log_probs import entropy_of, log_probs_of

KINDS = ("processed", "raw", "cut")  # log p(a), log p(a) at T = 1, log p(a) within the nucleus
SAME = 1e-3  # nats per token by which engines of one model differ in fp32
NEARER = 0.7  # |stored - another kind| / |stored - processed| at which the other one is meant
UNLIKE = 0.1  # nats per token beyond which none of the model's is meant: bf16 and 8 bits stay well below
HEAD = 1024  # likeliest tokens in which a nucleus is looked for first


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


def nucleus_mass(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R]
    top_p: float,
) -> Tensor:
    """sum of p over the smallest set that reaches top_p -> [R].

    arXiv:1904.09751, section 3.1. A whole vocabulary is sorted only where HEAD tokens do not reach it.
    """
    p = torch.softmax(logits.float() / temperature.float().unsqueeze(-1), -1)
    mass, reached = _kept(p.topk(min(HEAD, p.shape[-1]), -1).values, top_p)
    if p.shape[-1] > HEAD and not bool(reached.all()):
        mass[~reached] = _kept(p[~reached].sort(-1, descending=True).values, top_p)[0]
    return mass


def _kept(ordered: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    summed = ordered.cumsum(-1)
    return ordered.where(summed - ordered < top_p, 0).sum(-1), summed[..., -1] >= top_p


def other_kinds(
    logits: Tensor,  # [R, V]
    ids: Tensor,  # [R]
    temperature: Tensor,  # [R]
    top_p: float,
) -> Tensor:
    """Log-probs of a as engines state them that do not say log p(a): raw and cut -> [2, R]."""
    processed = log_probs_of(logits, ids, temperature)
    return torch.stack(
        [log_probs_of(logits, ids), processed - nucleus_mass(logits, temperature, top_p).log()]
    )


def kind_of(
    apart: Mapping[str, float],  # mean |stored - the model's own| of each of KINDS, nats per token
) -> str:
    """Which of KINDS stored log-probs are; "unknown" where they are none of this model's.

    They are processed unless another kind is clearly nearer.
    """
    processed, nearest = apart["processed"], min(KINDS, key=lambda kind: apart[kind])
    other = processed > SAME and apart[nearest] < NEARER * processed
    kind = nearest if other else "processed"
    return kind if apart[kind] <= UNLIKE else "unknown"
