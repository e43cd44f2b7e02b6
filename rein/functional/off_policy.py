"""Off-policy correction as a whole: the weights, what is rejected, and what is logged of both.

B rows by T positions; behavior is who wrote the data, old is the actor at the start of this batch's updates.
Weights are detached. Rejection changes the mask of the losses only: no weight, no denominator. The parts are
weights.py, rejection.py, correction_metrics.py and staleness.py; names and presets are presets.py's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rein.functional.correction_metrics import distance_metrics, rejection_metrics, weight_metrics
from rein.functional.rejection import criteria
from rein.functional.staleness import staleness
from rein.functional.weights import importance_weights


class Corrected(NamedTuple):
    """What an update takes of it."""

    weights: Tensor | None  # [B, T]  None: no weights asked for
    mask: Tensor  # [B, T]  what is left after rejection
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Corrected:
    """Weights, rejection and verl's metrics of one batch; fields of presets.Correction.

    Metrics carry the prefix `rollout_corr/`. A mask without a counted token gives none of them.
    """
    metrics: dict[str, float] = {}
    weights = None
    if rollout_is is not None:
        found = importance_weights(
            old_log_probs,
            behavior_log_probs,
            mask,
            level=rollout_is,
            threshold=rollout_is_threshold,
            batch_normalize=rollout_is_batch_normalize,
        )
        weights = found.applied
        metrics |= weight_metrics(
            found, old_log_probs, behavior_log_probs, mask, level=rollout_is, threshold=rollout_is_threshold
        )
    kept = mask.clone()
    if rollout_rs is not None:
        rules = criteria(
            old_log_probs, behavior_log_probs, mask, names=rollout_rs, threshold=rollout_rs_threshold
        )
        for rule in rules:
            kept &= rule.kept
        metrics |= rejection_metrics(rules, kept, mask)
    metrics |= distance_metrics(old_log_probs, behavior_log_probs, mask)
    return Corrected(weights, kept, _named(metrics))


@torch.no_grad()
def diagnostics(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    threshold: float | str | None = None,  # None: nothing of weights bounded by it
    seed: int = 0,
) -> dict[str, float]:
    """How stale a batch is, whatever is done about it: distances, raw weights, and token weights at
    `threshold`.

    In float64; raw numbers are called raw_* (tokens) and seq_* (rows), bounded ones by verl's names.
    """
    found = distance_metrics(old_log_probs, behavior_log_probs, mask)
    found |= staleness(old_log_probs, behavior_log_probs, mask, seed=seed)
    if threshold is not None:
        weights = importance_weights(
            old_log_probs, behavior_log_probs, mask, level="token", threshold=threshold
        )
        found |= weight_metrics(
            weights, old_log_probs, behavior_log_probs, mask, level="token", threshold=threshold
        )
    return _named(found)


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}
