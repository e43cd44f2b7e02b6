"""One decoding step: logits and one uniform number a row in, chosen ids and their log-probs out.

Log-probs are of the full softmax at the temperature, before top-p cuts anything: what a trained policy can
reproduce. The numbers of an answer depend on (seed, prompt, sample) alone, so no batching changes what is
drawn.
"""

import numpy as np
import torch
from torch import Tensor

HEAD = 1024  # likeliest tokens among which top-p looks first
CHUNK = 256  # tokens of the vocabulary whose mass is summed before one is looked for among them


def uniforms(seed: int, prompt: int, sample: int, count: int) -> np.ndarray:
    """The numbers in [0, 1) that choose an answer's tokens; a longer answer's begin with a shorter one's."""
    generator: np.random.Generator = np.random.default_rng([seed, prompt, sample])
    return generator.random(count)


def choose(
    logits: Tensor,  # [B, V]
    *,
    temperature: float,  # 0: greedy
    top_p: float,
    draws: Tensor,  # [B], float64, in [0, 1)
) -> tuple[Tensor, Tensor]:
    """Ids and log-probs, [B] each; greedy log-probs are those at temperature 1, for 0 never divides."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if temperature == 0:
        ids = wide.argmax(-1)
        log_p = wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)
        return ids, log_p
    p = torch.softmax(wide if temperature == 1 else wide / temperature, -1)
    ids = _inverse(p, draws) if top_p >= 1 else _from_nucleus(p, top_p, draws)
    return ids, p.gather(-1, ids.unsqueeze(-1)).squeeze(-1).log()


def _inverse(p: Tensor, draws: Tensor) -> Tensor:
    """The token at which the summed mass of [B, V] first passes draws x the whole, [B].

    Found in two stages, chunk and token: sums over a whole vocabulary are slow, and coarse in float32.
    """
    vocabulary = p.shape[-1]
    whole = vocabulary // CHUNK
    mass = p[:, : whole * CHUNK].reshape(len(p), whole, CHUNK).sum(-1)
    if vocabulary % CHUNK:
        mass = torch.cat([mass, p[:, whole * CHUNK :].sum(-1, keepdim=True)], -1)
    summed = mass.double().cumsum(-1)
    target = draws.unsqueeze(-1) * summed[:, -1:]
    chunk = _first_above(summed, target)
    target = target - (summed - mass).gather(-1, chunk)
    tokens = chunk * CHUNK + torch.arange(min(CHUNK, vocabulary), device=p.device)
    inside = p.gather(-1, tokens.clamp(max=vocabulary - 1)).where(tokens < vocabulary, 0).double()
    found = _first_above(inside.cumsum(-1), target)
    # Rounding at the end of a chunk may land on a token of probability 0.
    found = torch.where(inside.gather(-1, found) > 0, found, inside.argmax(-1, keepdim=True))
    return tokens.gather(-1, found).squeeze(-1)


def _first_above(summed: Tensor, target: Tensor) -> Tensor:
    return torch.searchsorted(summed, target, right=True).clamp(max=summed.shape[-1] - 1)


def _from_nucleus(p: Tensor, top_p: float, draws: Tensor) -> Tensor:
    """A token of the smallest set whose mass reaches top_p (arXiv:1904.09751), likeliest first.

    A whole vocabulary is sorted only for rows whose HEAD likeliest tokens hold less than that.
    """
    ordered, order = p.topk(min(HEAD, p.shape[-1]), -1)
    ids = _first_of(ordered, order, top_p, draws)
    short = ordered.sum(-1) < top_p
    if p.shape[-1] > HEAD and bool(short.any()):
        ids[short] = _first_of(*p[short].sort(-1, descending=True), top_p, draws[short])
    return ids


def _first_of(ordered: Tensor, order: Tensor, top_p: float, draws: Tensor) -> Tensor:
    kept = ordered.where(ordered.cumsum(-1) - ordered < top_p, 0)
    return order.gather(-1, _inverse(kept, draws).unsqueeze(-1)).squeeze(-1)
