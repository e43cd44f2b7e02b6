"""What is logged of off-policy correction, under verl's names without their prefix `rollout_corr/`.

Everything is finite, exponents being bounded at 80, and computed in float64, but for spreads: those are
verl's to the digit, rounding and epsilon included, so that dashboards agree. Rows without a counted token
enter the means over rows, as in verl. Weights here are the applied ones; those before any bound are
staleness.py's.
"""

import math

import torch
from torch import Tensor

from rein.functional.masked import LOG_RATIO_CLAMP, masked_mean, masked_sum
from rein.functional.presets import weight_bounds
from rein.functional.rejection import Criterion
from rein.functional.weights import Weights, log_weights

EXPONENT_MAX = 80.0

Metrics = dict[str, float]


def _exp(values: Tensor) -> Tensor:
    return values.clamp(max=EXPONENT_MAX).exp()


def _mean(values: Tensor, mask: Tensor) -> float:
    return masked_mean(values.double(), mask).item()


def _std(values: Tensor, mask: Tensor) -> float:
    """sqrt(E[v^2] - E[v]^2)"""
    variance = masked_mean(values.square(), mask) - masked_mean(values, mask).square()
    return variance.clamp(min=0).sqrt().item()


def _over_rows(rows: Tensor, center: float) -> Metrics:
    """Mean, spread, ends and largest distance from `center` of a number per row, [N] with N >= 1."""
    return {
        "mean": rows.mean().item(),
        "std": rows.std().item() if len(rows) > 1 else 0.0,
        "max": rows.max().item(),
        "min": rows.min().item(),
        "max_deviation": (rows - center).abs().max().item(),
    }


def _effective(applied: Tensor, mask: Tensor) -> float:
    """(mean w + 1e-8)^2 / mean w^2 over tokens, at most 1; 0 where all are 0, where verl divides by it."""
    square = masked_mean(applied.square(), mask)
    if square == 0:
        return 0.0
    return ((masked_mean(applied, mask) + 1e-8).square() / square).clamp(max=1).item()


def _share(found: Tensor) -> float:
    return found.double().mean().item()


@torch.no_grad()
def weight_metrics(
    weights: Weights,
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    level: str,
    threshold: float | str,
) -> Metrics:
    """rollout_is_*: applied weights (before batch normalisation), and how often raw ones pass the bounds.

    Nothing counts: no metrics.
    """
    if not mask.any():
        return {}
    cut, high = weight_bounds(threshold)
    low = 1 / high if cut is None else cut
    applied, raw = weights.bounded.double(), weights.raw.double()
    found = {
        "mean": _mean(applied, mask),
        "std": _std(weights.bounded, mask),
        "eff_sample_size": _effective(applied, mask),
    }
    if level == "token":
        found["max"], found["min"] = applied[mask].max().item(), applied[mask].min().item()
        found["ratio_fraction_high"] = _mean(raw > high, mask)
        found["ratio_fraction_low"] = _mean(raw < low, mask)
    else:
        per_row = log_weights(old_log_probs, behavior_log_probs, mask, level)[:, 0]
        found["max"] = per_row.max().clamp(max=LOG_RATIO_CLAMP).exp().item()
        found["min"] = _exp(per_row.min()).item()
        found["ratio_fraction_high"] = _share(per_row > math.log(high))
        found["ratio_fraction_low"] = _share(per_row < math.log(low))
    found |= {
        f"seq_{name}": value for name, value in _over_rows(masked_mean(weights.bounded, mask, 1), 1).items()
    }
    raw_rows = masked_mean(raw, mask, 1)
    found["seq_fraction_high"] = _share(raw_rows > high)
    found["seq_fraction_low"] = _share(raw_rows < low)
    if cut is not None:
        found["oob_ratio"] = _mean((raw < low) | (raw > high), mask)
    if weights.factor is not None:
        found["batch_norm_factor"] = weights.factor
    return {f"rollout_is_{name}": value for name, value in found.items()}


@torch.no_grad()
def rule_metrics(rule: Criterion, mask: Tensor) -> Metrics:
    """rollout_rs_<rule>_*: the statistic, and what the rule drops. Nothing counts: no metrics."""
    if not mask.any():
        return {}
    counted = mask.any(1)
    rows = masked_mean(rule.statistic, mask, 1) if rule.per_row is None else rule.per_row
    rows = rows[counted]
    low = 0.0 if rule.low is None else rule.low
    found = {
        "mean": _mean(rule.statistic, mask),
        "std": _std(rule.statistic.clamp(low, rule.high), mask),
        "masked_fraction": _mean(~rule.kept, mask),
        "seq_masked_fraction": _share((~rule.kept & mask).any(1)[counted]),
    }
    values = rule.statistic[mask] if rule.per_row is None else rows
    found["max"], found["min"] = values.max().item(), values.min().item()
    found["fraction_high"] = _share(values > rule.high)
    found["fraction_low"] = 0.0 if rule.low is None else _share(values < rule.low)
    found |= {f"seq_{name}": value for name, value in _over_rows(rows, 0).items()}
    found["seq_fraction_high"] = _share(rows > rule.high)
    if rule.low is not None:
        found["seq_fraction_low"] = _share(rows < rule.low)
    return {f"rollout_rs_{rule.name}_{name}": value for name, value in found.items()}


@torch.no_grad()
def rejection_metrics(rules: list[Criterion], kept: Tensor, mask: Tensor) -> Metrics:
    """All rules together and each; shares of rows count every row, those of a rule only rows that count."""
    if not mask.any():
        return {}
    found = {
        "rollout_rs_masked_fraction": _mean(~kept, mask),
        "rollout_rs_seq_masked_fraction": _share((~kept & mask).any(1)),
    }
    for rule in rules:
        found |= rule_metrics(rule, mask)
    return found


@torch.no_grad()
def distance_metrics(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
) -> Metrics:
    """Perplexities, k1, k2 and k3 of KL(behavior || old), and chi-square, from stored tokens.

    z = old - behavior: kl = mean(-z), k2_kl = mean(z^2 / 2), k3_kl = mean(e^z - z - 1), chi2_token =
    mean(e^2z) - 1 and chi2_seq = mean over rows (e^(2 sum z)) - 1 with z or its sum clamped at +-20. Nothing
    counts: no metrics.
    """
    if not mask.any():
        return {}
    old, behavior = old_log_probs.double().where(mask, 0), behavior_log_probs.double().where(mask, 0)
    z = old - behavior
    row_old, row_behavior = masked_mean(old, mask, 1), masked_mean(behavior, mask, 1)
    gap = row_behavior - row_old
    row_sum = masked_sum(z, mask, 1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {
        "training_ppl": _exp(-row_old).mean().item(),
        "training_log_ppl": -row_old.mean().item(),
        "rollout_ppl": _exp(-row_behavior).mean().item(),
        "rollout_log_ppl": -row_behavior.mean().item(),
        "kl": -_mean(z, mask),
        "k2_kl": _mean(0.5 * z.square(), mask),
        "k3_kl": _mean(_exp(z) - z - 1, mask),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_abs_diff": gap.abs().mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "ppl_ratio": _exp(gap).mean().item(),
        "chi2_token": _mean((2 * z.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).exp(), mask) - 1,
        "chi2_seq": (2 * row_sum).exp().mean().item() - 1,
    }
