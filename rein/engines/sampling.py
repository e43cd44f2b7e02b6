"""One decoding step: logits in, chosen ids and their log-probs out.

Log-probs are of the full softmax at the temperature, before top-p cuts anything: what a trained policy can
reproduce.
"""

import torch
from torch import Tensor


def choose(
    logits: Tensor,  # [B, V]
    *,
    temperature: float,  # 0: greedy
    top_p: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Ids and log-probs, [B] each; greedy log-probs are those at temperature 1, for 0 never divides."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    log_p = torch.log_softmax(wide / temperature if temperature > 0 else wide, -1)
    if temperature == 0:
        ids = log_p.argmax(-1)
    else:
        p = log_p.exp()
        if top_p < 1:
            p = _nucleus(p, top_p)
        # Inverse CDF: one uniform number a row, cheaper than multinomial over a large vocabulary.
        cumulative = p.cumsum(-1)
        draw = torch.rand(len(p), 1, generator=generator, dtype=cumulative.dtype) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, draw, right=True).squeeze(-1).clamp(max=p.shape[-1] - 1)
        # Rounding at the far end of the sum may land on a token of probability 0.
        ids = torch.where(p.gather(-1, ids.unsqueeze(-1)).squeeze(-1) > 0, ids, p.argmax(-1))
    return ids, log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    """The smallest set of tokens whose mass reaches top_p keeps it, the rest is 0 (arXiv:1904.09751)."""
    ordered, order = p.sort(-1, descending=True)
    keep = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(p).scatter(-1, order, ordered.where(keep, 0))
