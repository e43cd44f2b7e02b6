"""Which curves the page shows, and in one sentence what each says. Metrics lines in, points to draw out.

Charts are data for the page's script; a chart whose metrics a run does not have is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 2000  # of a line on the page; each pair keeps the extremes of its stretch


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing: the metrics on it, each with its label, and its sentence."""

    title: str
    lines: dict[str, str]  # metric -> label
    sentence: str
    log: bool = False


TRAIN = (
    Chart(
        "Held-out score",
        {"val/score": "score", "val/proxy_score": "proxy"},
        "Greedy answers to held-out prompts, judged by the truth; the proxy is what training maximises. A "
        "proxy that rises alone means that the reward is being gamed.",
    ),
    Chart(
        "Distance from the start (probe/kl_reference)",
        {"probe/kl_reference": "KL(actor || reference)"},
        "Exact KL to the frozen start policy over the whole vocabulary, nats per token, on fixed held-out "
        "rows. Limits and the KL controller read this one.",
    ),
    Chart(
        "The same distance from stored tokens (kl/reference)",
        {"kl/reference": "estimate", "kl/reference_capped": "capped at 10"},
        "Estimated on each batch's own tokens: unbiased but heavy-tailed, so single spikes say little.",
    ),
    Chart(
        "Clipped tokens",
        {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped by the dual clip"},
        "Share of tokens whose probability ratio left the clip range. A few per cent are usual; a jump "
        "means that the steps are too large.",
    ),
    Chart(
        "Entropy",
        {"actor/entropy": "on the batch", "probe/entropy": "on the probe"},
        "How undecided the actor is, nats per token. A fall to zero means that it always says the same; a "
        "steady rise, that it is coming apart.",
    ),
    Chart(
        "Critic: explained variance",
        {"critic/vf_explained_var": "explained variance"},
        "Share of the returns' variance that the critic explains: 1 is perfect, 0 no better than their "
        "mean, below 0 worse than that.",
    ),
    Chart(
        "Losses",
        {"actor/pg_loss": "policy", "actor/kl_loss": "KL", "critic/vf_loss": "value"},
        "What the updates minimise. The policy loss is no measure of progress: the held-out score is.",
    ),
    Chart(
        "Gradient norms",
        {"actor/grad_norm": "actor", "critic/grad_norm": "critic"},
        "Before clipping. Spikes are clipped; a level far above grad_clip means that every step is.",
        log=True,
    ),
    Chart(
        "Learning rates",
        {"actor/lr": "actor", "critic/lr": "critic"},
        "One value per optimizer step: warm-up, then the schedule.",
    ),
    Chart(
        "KL coefficient",
        {"actor/kl_coef": "coefficient"},
        "How strongly the actor is held to the reference; constant unless a controller or a guard moves it.",
    ),
    Chart(
        "Off-policy weights",
        {"rollout_corr/rollout_is_mean": "mean", "rollout_corr/seq_ess": "effective sample share"},
        "Old policy over the policy that wrote the data. Both lines near 1: the data still fits the actor.",
    ),
    Chart(
        "Throughput",
        {"perf/throughput": "tokens per second"},
        "Tokens of a step's batch, each counted once, over all that it took: updates, validation, saving.",
    ),
    Chart(
        "Length of held-out answers",
        {"val/response_length": "tokens"},
        "Mean tokens of the greedy answers. A reward that pays for length shows here first.",
    ),
    Chart(
        "Repetition of held-out answers",
        {"val/repetition": "repeated 4-grams", "val/truncated": "cut off by the limit"},
        "Share of four-token pieces seen before in the same answer, and of answers that did not end by "
        "themselves.",
    ),
)
SFT = (
    Chart(
        "SFT loss",
        {"train/loss": "loss"},
        "Negative log-likelihood of the demonstrations' responses, nats per token.",
    ),
)
REWARD = (
    Chart(
        "Reward model loss",
        {"train/loss": "loss"},
        "Bradley-Terry loss on preference pairs; 0.693 is a coin toss.",
    ),
    Chart(
        "Reward model accuracy",
        {"train/accuracy": "pairs in the right order"},
        "Share of the batch's pairs whose chosen response scores higher.",
    ),
)
CHARTS: dict[str, tuple[Chart, ...]] = {"train": TRAIN, "reward": REWARD, "sft": SFT}
X_TITLE = {"train": "update", "reward": "step", "sft": "step"}


def draw(stage: str, metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stage's charts that have something to show, as the page's script reads them."""
    found = []
    for chart in CHARTS[stage]:
        lines, gaps = [], 0
        for metric, label in chart.lines.items():
            present = [(line["number"], line[metric]) for line in metrics if metric in line]
            points = [(number, value) for number, value in present if _finite(value)]
            gaps += len(present) - len(points)
            if points:
                xs, ys = zip(*thinned(points), strict=True)
                lines.append({"label": label, "metric": metric, "x": list(xs), "y": list(ys)})
        if lines:
            positive = all(value > 0 for line in lines for value in line["y"])
            sentence = chart.sentence + (f" Not finite and not drawn: {gaps}." if gaps else "")
            found.append(
                {
                    "title": chart.title,
                    "sentence": sentence,
                    "log": chart.log and positive,
                    "x_title": X_TITLE[stage],
                    "lines": lines,
                }
            )
    return found


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most MOST_POINTS of the points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / MOST_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
