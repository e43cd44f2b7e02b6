"""What a model says of the rows (audit.model.facts), as sections of the audit's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rein.report.section import Bars, Fact, Facts, Section, figure


def model(facts: Facts) -> Section | None:
    """Perplexity, and where log-probs are stored how they compare with the model's own."""
    found = facts["model"]
    if not found:
        return None
    rows = [
        Fact("rows, tokens", f"{found['rows']:,}, {found['tokens']:,}", "a sample"),
        Fact("perplexity", figure(found["perplexity"]), f"{figure(found['nll'])} nats a token"),
        Fact("surprise", figure(found["surprise"]["mean"]), _interval(found["surprise"])),
        Fact("likeliest temperature", max(found["temperatures"], key=lambda t: found["temperatures"][t])),
    ]
    sentences = [
        "Surprise is -log p less the model's entropy, nats a token: about 0 where the model itself wrote the "
        "answers, below where it wrote them colder or with its tail cut off, above where another did.",
    ]
    charts = []
    if "behavior" in found:
        rows += _behavior(found)
        near = found["behavior"]["temperatures"]
        charts.append(
            Bars(
                "Stored log-probs against the model's own, by temperature",
                list(near),
                list(near.values()),
                "temperature",
                "mean difference, nats",
            )
        )
        sentences += [
            "A weight is the model's probability / the stored one: of tokens it averages 1 where the stored "
            "log-probs are of who wrote the answers, whoever that is.",
            "Weights of rows are products over their tokens; their effective sample size (ESS) says how many "
            "rows speak for the model.",
        ]
    return Section(f"With the model {found['path']}", rows, charts, sentences)


def by_part(facts: Facts) -> Section | None:
    """Distance and weights by length and by who wrote the rows."""
    found = facts["model"]
    if not found or "behavior" not in found:
        return None
    rows = [
        Fact(f"{what} {name}", f"k3 {figure(part['k3'])}", _weights(part))
        for what, parts in (("tokens", found["by_length"]), ("behavior", found["by_policy"]))
        for name, part in parts.items()
    ]
    return Section("With the model, by part", rows)


def _behavior(found: Mapping[str, Any]) -> list[Fact]:
    gap, distance, weights = found["behavior"], found["distance"], found["weights"]
    tails = f"99 % {figure(weights['log_weight_p99'])}, 99.9 % {figure(weights['log_weight_p999'])}"
    rows = [
        Fact("stored - own log-probs", f"at most {figure(gap['max'])}", f"99 % within {figure(gap['p99'])}"),
        Fact(
            "k1, k2, k3 to behavior", ", ".join(figure(distance[k]) for k in ("kl", "k2_kl", "k3_kl")), "nats"
        ),
        Fact("mean token weight", figure(found["token_weight"]["mean"]), _interval(found["token_weight"])),
        Fact("|log token weight|", f"at most {figure(weights['log_weight_max'])}", tails),
        Fact("ESS of tokens, rows", f"{figure(weights['raw_ess'])}, {figure(weights['seq_ess'])}", "shares"),
        Fact("largest row's share", figure(weights["seq_max_share"])),
        Fact(
            "mean row weight",
            figure(weights["seq_mean"]),
            f"{figure(weights['seq_mean_low'])} to {figure(weights['seq_mean_high'])}",
        ),
    ]
    if "seq_pareto_k" in weights:
        rows.append(
            Fact("Pareto k", figure(weights["seq_pareto_k"]), "above 0.7 trust no mean of row weights")
        )
    return rows


def _weights(part: Mapping[str, float]) -> str:
    return f"{part['rows']:.0f} rows, ESS {figure(part['seq_ess'])}, mean weight {figure(part['seq_mean'])}"


def _interval(found: Mapping[str, float]) -> str:
    return f"{figure(found['low'])} to {figure(found['high'])}"
