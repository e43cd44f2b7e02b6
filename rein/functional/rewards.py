"""Scores in, token-level rewards out: normalising, clipping, penalties, placing on tokens, KL in reward.

B rows by T right-padded positions; masks are True where a token counts. The order is fixed: normalize, clip,
add the terms (missing end, overlong, length, repetition), place on tokens, subtract the KL. Placing never
moves a row's total; the terms do, and say so. Knows nothing of models or files.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rein.functional.evaluation import repetition
from rein.functional.kl import kl_penalty


def score_statistics(scores: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all scores of a dataset: one pass over the file, then fixed; 0, 1 of
    none."""
    scores = scores.double()
    if len(scores) == 0:
        return 0.0, 1.0
    return scores.mean().item(), scores.std(unbiased=False).item()


def normalize(scores: Tensor, *, mean: float, std: float) -> Tensor:
    """(s - mean) / std, [B]; scores without spread are only centred."""
    return (scores - mean) / _divisor(mean, std)


def _divisor(mean: float, std: float) -> float:
    return std if std > 1e-6 * max(1.0, abs(mean)) else 1.0


def missing_end(finished: Tensor, *, penalty: float) -> Tensor:
    """-penalty for each response that did not end by itself, [B]. Moves totals.

    TRL's `missing_eos_penalty`. `finished`: [B] bool.
    """
    return torch.zeros(finished.shape, device=finished.device).where(finished, -penalty)


def overlong(
    lengths: Tensor,  # [B]  counted tokens
    *,
    max_length: int,
    buffer: int,
    factor: float = 1.0,
) -> Tensor:
    """min(-(length - (max_length - buffer)) / buffer, 0) factor, not below -factor, [B]. Moves totals.

    DAPO's soft punishment (arXiv:2503.14476, eq. 13). Raises ValueError for a buffer outside 1..max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong: buffer {buffer} must lie between 1 and max_length {max_length}")
    excess = (lengths - (max_length - buffer)).float() / buffer
    return -factor * excess.clamp(0, 1)


def length_cost(lengths: Tensor, *, per_token: float, free: int = 0) -> Tensor:
    """-per_token for each counted token beyond the first `free`, [B]. Moves totals."""
    return -per_token * (lengths - free).clamp(min=0).float()


def repetition_cost(
    response_ids: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    penalty: float,
    n: int = 4,
) -> Tensor:
    """-penalty times the share of n-grams that stood there before (evaluation.repetition), [B]. Moves
    totals."""
    shares = [repetition(ids[counts], n=n) for ids, counts in zip(response_ids, mask, strict=True)]
    return -penalty * torch.tensor(shares, device=response_ids.device)


def shape_scores(
    scores: Tensor,  # [B]
    *,
    statistics: tuple[float, float] | None = None,  # of the dataset: mean, std
    clip_range: tuple[float, float] | None = None,
    terms: Sequence[Tensor] = (),  # [B] each, such as overlong(...)
) -> Tensor:
    """Normalise, clip, then add the terms, [B]; each step only where it is asked for."""
    if statistics is not None:
        scores = normalize(scores, mean=statistics[0], std=statistics[1])
    if clip_range is not None:
        scores = scores.clamp(*clip_range)
    for term in terms:
        scores = scores + term
    return scores


def last_position(mask: Tensor) -> Tensor:
    """Index of each row's last counted token, [B]; 0 where none counts."""
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return positions.where(mask, -1).amax(1).clamp(min=0)


def place_on_last_token(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
) -> Tensor:
    """token_level_scores [B, T]: the whole score on the last counted token, however the row ended."""
    placed = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    placed.scatter_(1, last_position(mask).unsqueeze(1), scores.unsqueeze(1))
    return placed.where(mask, 0)


def spread_uniformly(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
) -> Tensor:
    """token_level_scores [B, T]: an equal part on each counted token; the row's total is the score."""
    return spread_exponentially(scores, mask, decay=1.0)


def spread_exponentially(
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
    *,
    decay: float,
) -> Tensor:
    """token_level_scores [B, T]: s d^k / sum_j d^j, k counted tokens before the last; the total is the score.

    Raises ValueError for a decay outside (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"spread_exponentially: decay {decay} must lie in (0, 1]")
    before_last = mask.sum(1, keepdim=True) - mask.cumsum(1)
    shares = torch.pow(decay, before_last.double()).where(mask, 0)
    shares = shares / shares.sum(1, keepdim=True).where(mask.any(1, keepdim=True), 1)
    return (scores.unsqueeze(1) * shares).to(scores.dtype).where(mask, 0)


def keep_places(
    stored: Tensor,  # [B, T]  scores as they are stored on tokens; 0 where a row has none
    scores: Tensor,  # [B]
    mask: Tensor,  # [B, T]
    *,
    statistics: tuple[float, float] | None = None,  # of the dataset: mean, std
) -> Tensor:
    """token_level_scores [B, T]: each stored score (over std) in its place, and what the row's score has
    beside their sum on the last counted token; the row's total is the score.
    """
    kept = stored.where(mask, 0)
    if statistics is not None:
        kept = kept / _divisor(*statistics)
    return kept + place_on_last_token(scores - kept.sum(1), mask)


PLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "last": place_on_last_token,
    "uniform": spread_uniformly,
    "exponential": spread_exponentially,
}


def subtract_kl(
    token_level_scores: Tensor,  # [B, T]
    old_log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    kl_coef: float,
    kind: str,
    exact: Tensor | None = None,  # [B, T]  for the kinds of kl.EXACT_KINDS
) -> tuple[Tensor, Tensor]:
    """token_level_rewards = scores - beta * KL, and the KL itself, both [B, T] and new tensors.

    arXiv:1909.08593, eq. 2, spread over tokens.
    """
    kl = kl_penalty(old_log_probs, ref_log_probs, kind, exact=exact, mask=mask)
    return token_level_scores - kl_coef * kl, kl
