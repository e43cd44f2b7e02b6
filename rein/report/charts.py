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
        "Held-out score by stored answers",
        {"ope/score": "estimate", "ope/low": "lower end", "ope/high": "upper end"},
        "What the actor would score, estimated from stored answers without generating, with its 95 % "
        "interval.",
    ),
    Chart(
        "Whether that estimate can be trusted",
        {"ope/ess": "effective rows", "ope/pareto_k": "Pareto k"},
        "Rows that the weighed answers are worth: under 50, or with Pareto k above 0.7, the estimate is "
        "refused.",
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
        "Distance from who wrote the data (kl/behavior)",
        {"kl/behavior": "estimate"},
        "KL to the behavior policy on each batch's own tokens, nats per token: the further, the less the "
        "stored answers say of the actor.",
    ),
    Chart(
        "Distance within a batch (kl/old)",
        {"kl/old": "kl/old", "actor/ppo_kl": "actor/ppo_kl"},
        "From the actor at the batch's start to the one that is being updated: it grows over a batch's "
        "updates and begins anew with the next.",
    ),
    Chart(
        "KL in the loss and in the reward",
        {"actor/kl_loss": "in the loss", "actor/reward_kl_penalty": "in the reward"},
        "What holds the actor to the reference, per token and before its coefficient.",
    ),
    Chart(
        "KL coefficient",
        {"actor/kl_coef": "in the loss", "actor/reward_kl_penalty_coeff": "in the reward"},
        "How strongly the actor is held to the reference; constant unless a controller or a guard moves it.",
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
        "Reward of each batch",
        {"critic/score/mean": "score", "critic/rewards/mean": "with the KL in the reward"},
        "Of the rows that are trained on: stored scores, shaped where the recipe asks. It describes the "
        "file, not the actor, except in rounds of fresh rollouts.",
    ),
    Chart(
        "What shaping adds to the score",
        {
            "shaping/missing_eos": "no end",
            "shaping/overlong": "overlong",
            "shaping/length": "length",
            "shaping/repetition": "repetition",
        },
        "Mean of each term over the batch's rows; a term that outweighs the score is what is being learned.",
    ),
    Chart(
        "Advantages",
        {
            "critic/advantages/mean": "mean",
            "critic/advantages/max": "highest",
            "critic/advantages/min": "lowest",
        },
        "How much better or worse than expected tokens turned out; where they are whitened the mean is 0. "
        "Far ends are single tokens that weigh much.",
    ),
    Chart(
        "Critic: explained variance",
        {"critic/vf_explained_var": "explained variance"},
        "Share of the returns' variance that the critic explains: 1 is perfect, 0 no better than their "
        "mean, below 0 worse than that.",
    ),
    Chart(
        "Critic: values and returns",
        {"critic/values/mean": "value", "critic/returns/mean": "return"},
        "What the critic expects of a batch's tokens, and what they brought. A lasting gap is a bias that "
        "every advantage has.",
    ),
    Chart(
        "Critic: clipped values",
        {"critic/vf_clipfrac": "clipped"},
        "Share of tokens whose value moved further in one update than the value clip lets it.",
    ),
    Chart(
        "Losses",
        {"actor/pg_loss": "policy", "critic/vf_loss": "value"},
        "What the updates minimise. The policy loss is no measure of progress: the held-out score is.",
    ),
    Chart(
        "Preference pairs",
        {"actor/dpo_accuracy": "in the right order"},
        "Share of a mini-batch's pairs whose chosen response gained more likelihood than the rejected one.",
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
        "One value per optimizer step: warm-up, then the schedule; a guard that softens shows here.",
    ),
    Chart(
        "Off-policy weights",
        {
            "rollout_corr/rollout_is_mean": "mean",
            "rollout_corr/rollout_is_eff_sample_size": "effective share of tokens",
            "rollout_corr/seq_ess": "effective share of rows",
        },
        "Old policy over the policy that wrote the data. Near 1 the data still fits the actor; whole rows, "
        "whose weights multiply, fall first.",
    ),
    Chart(
        "Largest off-policy weights",
        {"rollout_corr/raw_max": "largest, unbounded", "rollout_corr/rollout_is_max": "largest, as used"},
        "A token's weight before and after it is bounded: what lies between is taken off.",
        log=True,
    ),
    Chart(
        "Length of held-out answers",
        {"val/response_length": "held-out answers", "response_length/mean": "rows trained on"},
        "Mean tokens of the greedy answers, and of the stored ones. A reward that pays for length shows here "
        "first.",
    ),
    Chart(
        "Repetition of held-out answers",
        {"val/repetition": "repeated 4-grams", "val/truncated": "cut off by the limit"},
        "Share of four-token pieces seen before in the same answer, and of answers that did not end by "
        "themselves.",
    ),
    Chart(
        "Throughput",
        {"perf/throughput": "tokens per second"},
        "Tokens of a step's batch, each counted once, over all that it took: updates, validation, saving.",
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
                last = points[-1][1]
                lines.append({"label": label, "metric": metric, "x": list(xs), "y": list(ys), "last": last})
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
