"""Off-policy evaluation: what a policy would score on held-out prompts, by stored answers alone.

Train reads metrics_of where nothing may be generated; evaluate runs `run` with evaluate.generate=false, and
evaluation.json then says what stored answers tell of before and after. Scores are the stored ones, unshaped
and undiscounted; the policy meant is the actor at the temperature the answers were sampled with. Not a verb.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.config import paths
from rein.config.load import write_json
from rein.config.methods import needs, reads_scores
from rein.config.recipe import Recipe
from rein.data.loader import load_trajectories, rejects_kept, write_rejects
from rein.data.split import holdout
from rein.data.tokenize import Encoder
from rein.errors import DataError
from rein.experience import Passes, in_micro_batches, padded
from rein.experience.maker import group_numbers
from rein.functional.kl import off_policy_kl
from rein.functional.masked import masked_mean
from rein.functional.off_policy_evaluation import (
    Estimate,
    Trust,
    clustered,
    log_ratios,
    row_estimates,
    trust,
    with_missing,
)
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.place import loading
from rein.runtime.clock import Clock
from rein.runtime.memory import free_models
from rein.runtime.seeding import derive
from rein.stages.leave_out import without_prompts
from rein.stages.tokens import FACT, compared, encoder_of
from rein.stages.train_frozen import recomputed
from rein.tracking.console import Console
from rein.types import Metrics, Trajectory

REPORTED = "control_variate"


class Stored(NamedTuple):
    """Held-out rows as the estimators read them."""

    rows: list[Trajectory]
    mask: Tensor  # [B, T]
    rewards: Tensor  # [B, T]
    behavior: Tensor  # [B, T]
    groups: Tensor  # [B]


class Judged(NamedTuple):
    """What stored rows say of one policy."""

    rows: dict[str, Tensor]  # [B] by estimator
    estimates: dict[str, Estimate]
    lacking: float  # how far the reported low end was moved down for answers that the sample lacks
    trust: Trust
    kl: float  # KL(actor || behavior), nats per token


def stored(rows: Sequence[Trajectory]) -> Stored | None:
    """The rows with a score, log-probs of the behavior policy and a token that counts; None without any."""
    kept = [
        row
        for row in rows
        if row.score is not None and row.behavior_log_probs is not None and row.response_mask.any()
    ]
    if not kept:
        return None
    mask = padded([row.response_mask for row in kept], torch.bool)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    for i, row in enumerate(kept):
        counted = int(mask[i].nonzero()[-1])
        if row.token_level_scores is None:
            rewards[i, counted] = float(row.score or 0.0)
        else:
            rewards[i, : len(row.token_level_scores)] = torch.tensor(row.token_level_scores).double()
    behavior = [row.behavior_log_probs for row in kept if row.behavior_log_probs is not None]
    return Stored(kept, mask, rewards, padded(behavior, torch.float64), group_numbers(kept))


def judge(held: Stored, log_probs: Tensor, values: Tensor | None) -> Judged:
    """Every estimate for a policy with these log-probs; values of a critic that has not seen the rows."""
    log_w = log_ratios(log_probs.cpu(), held.behavior, held.mask)
    given = None if values is None else values.cpu()
    rows = row_estimates(log_w, held.rewards, held.mask, held.groups, given)
    estimates = {name: clustered(found, held.groups) for name, found in rows.items()}
    said, plain = trust(log_w, rows[REPORTED], held.groups), estimates[REPORTED]
    estimates[REPORTED] = with_missing(plain, said.mean_weight.value, held.rewards.sum(1).min().item())
    lacking = 0.0 if math.isinf(plain.low) else plain.low - estimates[REPORTED].low
    moved = off_policy_kl(log_w, torch.zeros_like(log_w), torch.zeros_like(log_w))
    return Judged(rows, estimates, lacking, said, masked_mean(moved, held.mask).item())


def metrics_of(rows: Sequence[Trajectory], passes: Passes, budget: int) -> Metrics:
    """ope/score, ope/low, ope/high, ope/ess, ope/pareto_k, ope/mean_weight, ope/trust (1 or 0) of the actor.

    No stored row that can be weighed: no metrics.
    """
    held = stored(rows)
    if held is None:
        return {}
    values = None if passes.critic is None else passes.values(held.rows, budget)
    found = judge(held, passes.log_probs(held.rows, budget), values)
    score, low, high = found.estimates[REPORTED]
    metrics = {"score": score, "low": low, "high": high, "ess": found.trust.ess}
    metrics |= {"mean_weight": found.trust.mean_weight.value, "trust": float(found.trust.trusted)}
    if not math.isnan(found.trust.pareto_k):
        metrics["pareto_k"] = found.trust.pareto_k
    return {f"ope/{name}": value for name, value in metrics.items() if math.isfinite(value)}


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """evaluation.json from the rows that train holds out: before, after, and their difference."""
    folder = paths.stage_dir(recipe, "evaluate")
    folder.mkdir(parents=True, exist_ok=True)
    models = {
        "before": recipe.evaluate.before or paths.start_policy(recipe, "train"),
        "after": recipe.evaluate.after or paths.trained_actor(recipe),
    }
    held: Stored | None = None
    values: Tensor | None = None
    judged: dict[str, Judged] = {}
    counts: dict[str, int] = {}
    marks: dict[str, str] = {}
    for name, path in models.items():
        actor = load_actor(path, where=f"evaluate.{name}", **loading(recipe.model))
        encoder = encoder_of(actor, recipe)
        marks = compared(encoder, console, path, paths.train_files(recipe))
        if held is None:
            held, counts = _held_out(recipe, console, actor, encoder, folder)
            values = _values(recipe, held)
        passes = Passes(actor, None)
        judged[name] = judge(held, passes.log_probs(held.rows, recipe.actor.token_budget), values)
        del actor, passes
        free_models()
    assert held is not None
    found = compare(held, judged["before"], judged["after"])
    evaluation = {"generated": False, "off_policy": found, "n": found["prompts"], "models": models}
    write_json(folder / "evaluation.json", evaluation)
    _say(console, found)
    return {"rows": counts, **evaluation, FACT: marks}


def compare(held: Stored, before: Judged, after: Judged) -> dict[str, Any]:
    """The `off_policy` part of evaluation.json; differences are of the same rows, clustered by prompt."""
    gaps = {name: clustered(after.rows[name] - before.rows[name], held.groups) for name in after.rows}
    value, low, high = gaps[REPORTED]
    gaps[REPORTED] = Estimate(value, low - after.lacking, high + before.lacking)
    return {
        "before": _as_json(before),
        "after": _as_json(after),
        "difference": {name: _interval(gap) for name, gap in gaps.items()},
        "trust": before.trust.trusted and after.trust.trusted,
        "reported": REPORTED,
        "prompts": len(torch.unique(held.groups)),
        "rows": len(held.rows),
    }


def _as_json(judged: Judged) -> dict[str, Any]:
    said = judged.trust
    return {
        "estimates": {name: _interval(found) for name, found in judged.estimates.items()},
        "trust": said.trusted,
        "reasons": list(said.reasons),
        "ess": said.ess,
        "pareto_k": None if math.isnan(said.pareto_k) else said.pareto_k,
        "products_k": None if math.isnan(said.products_k) else said.products_k,
        "mean_weight": said.mean_weight.value,
        "kl_behavior": judged.kl,
    }


def _interval(found: Estimate) -> dict[str, Any]:
    ends = [end if math.isfinite(end) else None for end in (found.low, found.high)]
    return {"score": found.value, "ci95": ends}


def _held_out(
    recipe: Recipe, console: Console, actor: Actor, encoder: Encoder, folder: Path
) -> tuple[Stored, dict[str, int]]:
    """The rows that train holds out. Raises DataError where none can be weighed."""
    files = paths.train_files(recipe)
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_trajectories(
            files, encoder, recipe.data, scored=reads_scores(recipe), ranked="pairs" in needs(recipe)
        )  # as train does, or others would be held out
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    known = without_prompts(loaded.rows, recipe, encoder)
    left_out = {"left_out": len(loaded.rows) - len(known)} if recipe.data.leave_out else {}
    rows = recomputed(recipe, console, actor.tokenizer, known, {}, Clock())
    trained, kept = holdout(rows, recipe.data.holdout_fraction, derive(recipe.data_seed, "holdout"))
    held = stored(kept)
    if held is None:
        raise DataError(
            f"{files[0]}: off-policy evaluation needs held-out rows with score and behavior_log_probs, and "
            f"none of {len(kept)} has both; raise data.holdout_fraction, set data.behavior=recomputed with "
            "data.behavior_model, or write evaluate.generate=true"
        )
    counts = {"in": loaded.total, "rejected": len(loaded.rejects), **left_out, "trained": len(trained)}
    counts |= {"not_weighed": len(kept) - len(held.rows), "weighed": len(held.rows)}
    console.say("rows: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items()))
    return held, counts


def _values(recipe: Recipe, held: Stored) -> Tensor | None:
    """V of the run's critic, which has not seen these rows; None where the run has none."""
    folder = paths.stage_dir(recipe, "train") / "critic"
    if not (folder / "config.json").exists():
        return None
    critic = load_critic(str(folder), **loading(recipe.model))
    budget = recipe.actor.token_budget
    values = in_micro_batches(
        held.rows, budget, lambda some, _: critic.values(some), share=critic.shares_prompts
    )
    return values


def _say(console: Console, found: dict[str, Any]) -> None:
    name = found["reported"]
    before, after = (found[side]["estimates"][name]["score"] for side in ("before", "after"))
    low, high = found["difference"][name]["ci95"]
    console.say(
        f"evaluate: by {found['rows']} stored answers to {found['prompts']} held-out prompts, {before:.4g} "
        f"before, {after:.4g} after, difference {after - before:+.4g} (95 % [{low:+.4g}, {high:+.4g}])"
    )
    for side in ("before", "after"):
        for reason in found[side]["reasons"]:
            console.say(f"warning: evaluate.{side}: do not trust this estimate: {reason}")
