"""What the answers of two models to the same prompts amount to: the numbers of evaluation.json.

Part of stages/evaluate.py. Lift is after minus before, paired by prompt; its interval is a bootstrap over
prompts. Knows no model and no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rein.config.recipe import Recipe
from rein.functional.evaluation import wins
from rein.functional.statistics import RESAMPLES, paired_bootstrap, pass_at_k, wilson
from rein.types import Trajectory
from rein.validator import shape

LENGTH_BINS = 4


@dataclass(slots=True)
class Answers:
    """What one model said to one prompt."""

    greedy: Trajectory
    samples: list[Trajectory]  # those of a seed together: pass_k of each
    proxy_score: float | None = None  # of the greedy answer


Side = dict[str, Answers]  # by the prompt's place in the file


def compare(recipe: Recipe, before: Side, after: Side) -> dict[str, Any]:
    """Both sides hold the same prompts, all with scores."""
    scores = {"before": _greedy_scores(before), "after": _greedy_scores(after)}
    binary = all(bool(((s == 0) | (s == 1)).all()) for s in scores.values())
    overall = _lift(scores, recipe.seed)
    pattern = recipe.evaluate.pattern
    return {
        "before": _side(recipe, before, scores["before"], binary=binary) | _well_formed(before, pattern),
        "after": _side(recipe, after, scores["after"], binary=binary) | _well_formed(after, pattern),
        "lift": overall["lift"],
        "lift_ci95": overall["lift_ci95"],
        **_win_rate(scores, recipe.seed),
        "by_data_source": _by_source(recipe, before, scores),
        "by_length": _by_length(recipe, before, scores),
        **_proxy(recipe, before, after),
        **_sampled(recipe, before, after, binary=binary),
        "n": len(before),
        "pass_k": recipe.evaluate.pass_k,
        "seeds": recipe.evaluate.seeds,
        "temperature": recipe.evaluate.temperature,
        "resamples": RESAMPLES,
        "seed": recipe.seed,
    }


def _greedy_scores(side: Side) -> Tensor:
    return torch.tensor([one.greedy.score for one in side.values()], dtype=torch.float64)


def _lift(scores: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    means = {name: float(values.mean()) for name, values in scores.items()}
    interval = paired_bootstrap(scores["before"], scores["after"], seed=seed)
    n = len(scores["before"])
    return {"n": n, **means, "lift": means["after"] - means["before"], "lift_ci95": list(interval)}


def _win_rate(scores: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    """Share of prompts on which after's greedy answer scores higher than before's; ties count half."""
    won = wins(scores["before"], scores["after"])
    interval = paired_bootstrap(torch.zeros_like(won), won, seed=seed)
    return {"win_rate": float(won.mean()), "win_rate_ci95": list(interval)}


def _by_source(recipe: Recipe, before: Side, scores: Mapping[str, Tensor]) -> dict[str, Any]:
    sources: dict[str, list[int]] = {}
    for index, one in enumerate(before.values()):
        sources.setdefault(one.greedy.data_source or "(none)", []).append(index)
    return {source: _part(scores, rows, recipe.seed) for source, rows in sorted(sources.items())}


def _by_length(recipe: Recipe, before: Side, scores: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Prompts in quarters by the tokens of before's answer: after's own would sort by the outcome."""
    lengths = torch.tensor([len(one.greedy.response_ids) for one in before.values()])
    shares = torch.arange(1, LENGTH_BINS, dtype=torch.float64) / LENGTH_BINS
    edges = torch.quantile(lengths.double(), shares, interpolation="lower")
    place = torch.bucketize(lengths.double(), edges)  # an edge belongs to the bin below it
    found = []
    for one in sorted(set(place.tolist())):
        rows = (place == one).nonzero().flatten()
        tokens = [int(lengths[rows].min()), int(lengths[rows].max())]
        found.append({"tokens": tokens, **_part(scores, rows.tolist(), recipe.seed)})
    return found


def _part(scores: Mapping[str, Tensor], rows: Sequence[int], seed: int) -> dict[str, Any]:
    index = torch.tensor(rows)
    return _lift({name: values[index] for name, values in scores.items()}, seed)


def _proxy(recipe: Recipe, before: Side, after: Side) -> dict[str, Any]:
    """The same of the proxy, over the prompts whose answers it could judge; nothing where there is none."""
    pairs = [(one.proxy_score, after[where].proxy_score) for where, one in before.items()]
    known = [(b, a) for b, a in pairs if b is not None and a is not None]
    if not known:
        return {}
    both = torch.tensor(known, dtype=torch.float64)
    scores = {"before": both[:, 0], "after": both[:, 1]}
    return {"proxy": _lift(scores, recipe.seed) | _win_rate(scores, recipe.seed)}


def _sampled(recipe: Recipe, before: Side, after: Side, *, binary: bool) -> dict[str, Any]:
    """Mean score of the sampled answers, in all and of each seed: how much of a lift is the draw."""
    k, seeds = recipe.evaluate.pass_k, recipe.evaluate.seeds
    if not k:
        return {}
    means = {
        name: torch.tensor([[row.score for row in one.samples] for one in side.values()], dtype=torch.float64)
        .view(len(side), seeds, k)
        .mean(2)
        for name, side in (("before", before), ("after", after))
    }
    by_seed = [
        _lift({name: values[:, seed] for name, values in means.items()}, recipe.seed) for seed in range(seeds)
    ]
    overall = _lift({name: values.mean(1) for name, values in means.items()}, recipe.seed)
    lifts = torch.tensor([one["lift"] for one in by_seed], dtype=torch.float64)
    spread = float(lifts.std()) if seeds > 1 else None
    return {"sampled": overall | {"by_seed": by_seed, "lift_std_over_seeds": spread}}


def _side(recipe: Recipe, side: Side, scores: Tensor, *, binary: bool) -> dict[str, Any]:
    """One model's numbers. `accuracy` is the mean score where scores are right or wrong, else null."""
    n, mean = len(scores), float(scores.mean())
    facts: dict[str, Any] = {"accuracy": mean if binary else None, "n": n, "score": mean}
    if binary:
        facts["accuracy_ci95"] = list(wilson(float(scores.sum()), n))
        facts |= _pass_at(side, recipe.evaluate.pass_k)
    return facts | shape([one.greedy for one in side.values()])


def _pass_at(side: Side, most: int) -> dict[str, float]:
    """pass@1, 2, 4, ... up to `most`, of the samples of all seeds."""
    drawn = len(next(iter(side.values())).samples)
    right = torch.tensor([sum(row.score == 1 for row in one.samples) for one in side.values()])
    ks = sorted({*(1 << i for i in range(most.bit_length())), most} - {0})
    return {f"pass@{k}": float(pass_at_k(right, drawn, k).mean()) for k in ks if k <= most}


def _well_formed(side: Side, pattern: str | None) -> dict[str, float]:
    """Share of answers that say something, end by themselves and match the pattern, where there is one."""
    rows = [one.greedy for one in side.values()]
    good = [
        row.finish_reason == "stop"
        and bool(row.response and row.response.strip())
        and (pattern is None or re.search(pattern, row.response) is not None)
        for row in rows
    ]
    return {"well_formed": sum(good) / len(good)}
