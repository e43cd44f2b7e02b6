"""Stored scores in, token-level scores out: the steps that a recipe's `reward_manager` asks for, in order.

B rows by T right-padded positions. A row's total moves only by what the recipe names. The KL in reward comes
later and is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rein.config.recipe import RewardManager
from rein.functional.rewards import (
    PLACEMENTS,
    keep_places,
    length_cost,
    missing_end,
    overlong,
    repetition_cost,
    shape_scores,
)
from rein.types import Metrics, Trajectory


class Shaped(NamedTuple):
    """What a batch's scores have become, and the mean of each term that was added."""

    token_level_scores: Tensor  # [B, T]
    metrics: Metrics


def shape(
    rows: Sequence[Trajectory],
    mask: Tensor,  # [B, T]
    manager: RewardManager,
    *,
    max_length: int,  # of a response, tokens
    statistics: tuple[float, float] | None,  # mean and std of the training rows' scores
) -> Shaped:
    """Normalise, clip, add the terms, place on tokens.

    Without `placement` a row's own token_level_scores stay where they are: what shaping adds to their sum, or
    takes from it, stands on the last counted token.
    """
    scores = torch.tensor([float(row.score or 0.0) for row in rows], dtype=torch.float64)
    statistics = statistics if manager.normalize else None
    terms = _terms(rows, mask, manager, max_length)
    totals = shape_scores(
        scores, statistics=statistics, clip_range=manager.clip_range, terms=list(terms.values())
    )
    if manager.placement is None:
        placed = keep_places(_stored(rows), totals, mask, statistics=statistics)
    else:
        place: Callable[[Tensor, Tensor], Tensor] = PLACEMENTS[manager.placement]
        if manager.placement_decay is not None:
            place = partial(PLACEMENTS[manager.placement], decay=manager.placement_decay)
        placed = place(totals, mask)
    return Shaped(placed.float(), {f"shaping/{name}": term.mean().item() for name, term in terms.items()})


def _terms(
    rows: Sequence[Trajectory], mask: Tensor, manager: RewardManager, max_length: int
) -> dict[str, Tensor]:
    """What is added to the scores, [B] each, by name; only what is on."""
    lengths, buffer = mask.sum(1), manager.overlong_buffer
    terms: dict[str, Tensor] = {}
    if manager.missing_eos_penalty:
        finished = torch.tensor([row.finish_reason == "stop" for row in rows])
        terms["missing_eos"] = missing_end(finished, penalty=manager.missing_eos_penalty)
    if buffer.enable and buffer.len is not None:
        terms["overlong"] = overlong(
            lengths, max_length=max_length, buffer=buffer.len, factor=buffer.penalty_factor
        )
    if manager.length_penalty:
        terms["length"] = length_cost(
            lengths, per_token=manager.length_penalty, free=manager.length_penalty_free
        )
    if manager.repetition_penalty:
        ids = pad_sequence([torch.from_numpy(row.response_ids) for row in rows], batch_first=True)
        terms["repetition"] = repetition_cost(
            ids, mask, penalty=manager.repetition_penalty, n=manager.repetition_ngram
        )
    return terms


def _stored(rows: Sequence[Trajectory]) -> Tensor:
    """token_level_scores as stored, [B, T]; 0 for a row that has none."""
    found = [
        np.zeros(len(row.response_ids)) if row.token_level_scores is None else row.token_level_scores
        for row in rows
    ]
    return pad_sequence([torch.tensor(some, dtype=torch.float64) for some in found], batch_first=True)
