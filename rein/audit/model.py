"""What a model says of stored rows: rows and an actor in, numbers ready for JSON out. Judges nothing.

`facts` holds: rows, tokens, nll, perplexity, surprise (-log p - H) with interval; temperatures: the mean
log-prob of the stored tokens at each; cut: how much probability lies above the stored tokens, and how often
it would without top_p. Where behavior log-probs are stored also behavior: how near the model's own they are,
at each temperature too; token_weight: mean old / behavior with interval; distance, trace_kept and
weights: functional/correction_metrics, advantages and staleness; by_length and by_policy: the main ones of
each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rein.data.batches import row_batches
from rein.functional.advantages import trace_kept
from rein.functional.calibration import above, chance_beyond, surprise
from rein.functional.correction_metrics import distance_metrics
from rein.functional.log_probs import log_probs_of
from rein.functional.staleness import LOG_MAX, staleness
from rein.functional.statistics import ratio_of_sums
from rein.models.actor import Actor
from rein.types import Trajectory

SAMPLE, TOKENS = 512, 50_000  # rows, and how many tokens they may have
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0)
CUTS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
PARTS = 4  # of the rows, by length


class Read(NamedTuple):
    """What the model says of each counted token of the sample, [N]; `row` is the token's row."""

    row: Tensor
    log_probs: Tensor
    surprise: Tensor
    above: Tensor
    beyond: Tensor  # [C, N]
    at: Tensor  # [G, N]  log-probs at TEMPERATURES
    behavior: Tensor  # NaN where it is not stored


def sample_of(rows: Sequence[Trajectory], size: int = SAMPLE) -> list[Trajectory]:
    """The same rows however the file is ordered; fewer where they are long."""
    chosen = sorted(rows, key=lambda row: row.key)[:size]
    ends = np.cumsum([len(row.response_ids) for row in chosen])
    return chosen[: max(int(np.searchsorted(ends, TOKENS)), 1)]


def facts(actor: Actor, rows: Sequence[Trajectory], budget: int) -> dict[str, Any]:
    """Of at most SAMPLE of the rows; `budget`: tokens of a micro-batch."""
    rows = sample_of(rows)
    return facts_of(actor.path, rows, read_of(actor, rows, budget))


def facts_of(path: str, rows: Sequence[Trajectory], read: Read) -> dict[str, Any]:
    """The numbers of what the model in `path` says of these rows."""
    numbers: dict[str, int] = {}
    alike = torch.tensor([numbers.setdefault(row.key, len(numbers)) for row in rows])  # copies say it once
    mean, interval = _per_row(read.surprise, alike[read.row], len(numbers))
    nll = -read.log_probs.mean().item()
    found: dict[str, Any] = {
        "path": path,
        "rows": len(rows),
        "tokens": len(read.row),
        "nll": nll,
        "perplexity": float(np.exp(min(nll, LOG_MAX))),
        "surprise": {"mean": mean, "low": interval[0], "high": interval[1]},
        "temperatures": {f"{t:g}": read.at[i].mean().item() for i, t in enumerate(TEMPERATURES)},
        "stated_temperature": float(np.mean([row.temperature for row in rows])),
        "cut": {
            "highest": read.above.max().item(),
            "expected": {f"{c:g}": read.beyond[i].sum().item() for i, c in enumerate(CUTS)},
            "seen": {f"{c:g}": int((read.above >= c).sum()) for c in CUTS},
        },
    }
    if all(row.behavior_log_probs is not None for row in rows):
        found |= _against_behavior(read, rows)
    return found


@torch.no_grad()
def read_of(actor: Actor, rows: Sequence[Trajectory], budget: int) -> Read:
    """What the model says of every counted token of these rows."""

    def compute(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
        own = [log_probs_of(logits, ids, temperature), surprise(logits, ids, temperature)]
        own.append(above(logits, ids, temperature))
        own += chance_beyond(logits, temperature, torch.tensor(CUTS, device=logits.device)).unbind()
        own += [log_probs_of(logits, ids, torch.full_like(temperature, t)) for t in TEMPERATURES]
        return torch.stack(own)

    columns, of_row, behavior = [], [], []
    for part in row_batches(rows, budget, share=actor.shares_prompts):
        some = [rows[i] for i in part]
        temperature = torch.tensor([row.temperature for row in some], dtype=torch.float64)
        found = actor.over_logits(some, temperature, compute).double().cpu()
        for i, row in enumerate(some):
            counted = torch.tensor(row.response_mask)
            columns.append(found[:, i, : len(counted)][:, counted])
            of_row.append(torch.full((columns[-1].shape[1],), part[i]))
            stored = row.behavior_log_probs
            nothing = np.full(len(row.response_mask), np.nan)
            behavior.append(torch.tensor(nothing if stored is None else stored).double()[counted])
    every = torch.cat(columns, 1)
    cuts = 3 + len(CUTS)
    return Read(
        torch.cat(of_row), every[0], every[1], every[2], every[3:cuts], every[cuts:], torch.cat(behavior)
    )


def _against_behavior(read: Read, rows: Sequence[Trajectory]) -> dict[str, Any]:
    gap = read.behavior - read.log_probs
    weights = (-gap).clamp(max=LOG_MAX).exp()
    mean, interval = _per_row(weights, read.row, len(rows))
    near = {f"{t:g}": (read.behavior - read.at[i]).abs().mean().item() for i, t in enumerate(TEMPERATURES)}
    lengths = torch.bincount(read.row, minlength=len(rows))
    parts = {}
    edges = torch.quantile(lengths.double(), torch.linspace(0, 1, PARTS + 1, dtype=torch.float64))
    for i, low in enumerate(edges[:-1]):
        last = i == PARTS - 1
        inside = (lengths >= low) & ((lengths <= edges[i + 1]) if last else (lengths < edges[i + 1]))
        if inside.any():
            name = f"{int(lengths[inside].min())} to {int(lengths[inside].max())}"
            parts[name] = _distance(read, inside)
    names = [f"{row.behavior_policy or 'unnamed'}, version {row.policy_version}" for row in rows]
    policies = {
        name: _distance(read, torch.tensor([own == name for own in names])) for name in sorted(set(names))
    }
    every = torch.ones(len(rows), dtype=torch.bool)
    dense = _dense(read, every)
    return {
        "behavior": {
            "median": gap.abs().median().item(),
            "p99": torch.quantile(gap.abs()[: 1 << 24], 0.99).item(),
            "max": gap.abs().max().item(),
            "lowest": gap.min().item(),
            "highest": gap.max().item(),
            "mean": gap.mean().item(),
            "mean_abs": gap.abs().mean().item(),
            "temperatures": near,
        },
        "token_weight": {"mean": mean, "low": interval[0], "high": interval[1]},
        "distance": distance_metrics(*dense),
        "trace_kept": trace_kept(*dense),
        "weights": staleness(*dense),
        "by_length": parts,
        "by_policy": policies,
    }


def _distance(read: Read, inside: Tensor) -> dict[str, float]:
    dense = _dense(read, inside)
    distance, weights = distance_metrics(*dense), staleness(*dense, resamples=200)
    kept = {name: weights[name] for name in ("seq_ess", "seq_mean", "seq_max_share", "raw_mean")}
    return {"rows": float(inside.sum()), "k1": distance["kl"], "k3": distance["k3_kl"], **kept}


def _dense(read: Read, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log-probs of model and behavior, and their mask, [rows, T]."""
    counts = torch.bincount(read.row, minlength=len(inside))[inside]
    mask = torch.arange(int(counts.max())) < counts[:, None]
    chosen = inside[read.row]
    order = torch.argsort(read.row[chosen], stable=True)
    own, behavior = torch.zeros(mask.shape).double(), torch.zeros(mask.shape).double()
    own[mask], behavior[mask] = read.log_probs[chosen][order], read.behavior[chosen][order]
    return own, behavior, mask


def _per_row(values: Tensor, row: Tensor, rows: int) -> tuple[float, tuple[float, float]]:
    sums = torch.zeros(rows, dtype=torch.float64).index_add(0, row, values)
    mean, interval = ratio_of_sums(sums, torch.bincount(row, minlength=rows))
    return mean, (interval.low, interval.high)
