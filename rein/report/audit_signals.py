"""Facts of an audit in, sections out: what there is to learn from, and who wrote it."""

from rein.report.section import Bars, Fact, Facts, Section, bars, count, ends, figure, percent, quantiles

NAMES = 8  # of a column that are shown
LIKELY = 0.3  # correlation of score and length from which on it is said
NO_TAIL = -5.0  # nats: a full softmax goes lower in a million tokens
TOKENS = 1_000_000


def score(facts: Facts) -> Section | None:
    found = facts["score"]
    if not found:
        return None
    spread, against = found["distribution"], found["against_length"]
    table = [Fact("score", quantiles(spread), ends(spread))]
    table += [Fact("without score", count(found["missing"]))] if found["missing"] else []
    warnings, charts = [], bars("Scores", spread, "score")
    if spread["distinct"] == 1:
        warnings.append("Every row scores the same: there is nothing to learn from.")
    if against:
        interval = f"95 % interval {against['low']:.2f} to {against['high']:.2f}"
        table.append(Fact("score against length", f"r = {against['r']:.2f}", interval))
        if min(abs(against["low"]), abs(against["high"])) > LIKELY and against["low"] * against["high"] > 0:
            what = "longer" if against["r"] > 0 else "shorter"
            warnings.append(f"The score pays for {what} responses (r = {against['r']:.2f}, {interval}).")
    if len(found["by_length"]) > 1:
        names = [f"{part['from']}–{part['to']}" for part in found["by_length"]]
        means = [part["mean"] for part in found["by_length"]]
        charts.append(Bars("Mean score by length", names, means, found["length_unit"], "mean score"))
    return Section("Scores", table, charts, (), warnings)


def groups(facts: Facts) -> Section | None:
    """Answers per prompt; where all of them score the same, group methods learn nothing."""
    found = facts["groups"]
    if not found or not found["groups"]:
        return None
    table = [Fact("prompts", count(found["groups"])), Fact("rows per prompt", quantiles(found["answers"]))]
    table.append(Fact("prompts with one row", count(found["single"])))
    warnings = []
    if found["without_spread"] is not None and found["several"]:
        share, lost = found["without_spread_share"], found["without_spread_rows"]
        table.append(
            Fact(
                "all answers score the same",
                count(found["without_spread"]),
                f"{percent(share)}, {count(lost)} rows",
            )
        )
        if share > 0.5:
            warnings.append(f"{percent(share)} of the prompts with several answers score them all the same.")
    return Section(
        "Prompts", table, bars("Rows per prompt", found["answers"], "rows", "prompts"), (), warnings
    )


def pairs(facts: Facts) -> Section | None:
    found = facts["pairs"]
    if not found:
        return None
    longer = found["chosen_longer_share"]
    table = [
        Fact("chosen is longer", percent(longer), f"shorter: {percent(found['chosen_shorter_share'])}"),
        Fact(f"chosen less rejected, {found['unit']}", quantiles(found["difference"])),
        Fact("chosen equals rejected", count(found["identical"])),
        Fact("one side empty", count(found["empty"])),
    ]
    warnings = []
    if found["rows"] >= 30 and longer is not None and not 0.3 <= longer <= 0.7:
        what = "longer" if longer > 0.5 else "not longer"
        warnings.append(
            f"The chosen answer is {what} in {percent(max(longer, 1 - longer))} of the pairs: length decides."
        )
    charts = bars("Chosen less rejected", found["difference"], found["unit"], "pairs")
    return Section("Pairs", table, charts, (), warnings)


def behavior(facts: Facts) -> Section | None:
    """What the stored log-probs say of how the responses were sampled."""
    found = facts["behavior"]
    if facts["kind"] != "trajectories":
        return None
    if not found:
        said = "No behavior log-probs are stored: no off-policy correction; methods that need it are refused."
        return Section("Behavior log-probs", sentences=[said])
    table = [
        Fact("rows that have them", count(found["rows"]), percent(found["rows_share"])),
        Fact("mean, nats per token", figure(found["mean"]), f"{count(found['tokens'])} tokens"),
        Fact("exactly 0", percent(found["zero_share"])),
        Fact("above 0", count(found["above_zero"])),
        Fact("lowest", figure(found["lowest"]), f"{count(found['at_lowest'])} tokens have exactly this"),
        Fact("below -5, -10, -20", ", ".join(percent(share) for share in found["below"].values())),
    ]
    warnings = []
    if found["zero_share"] > 0.5:
        warnings.append(
            f"{percent(found['zero_share'])} of the log-probs are exactly 0: greedy, or never computed."
        )
    if found["above_zero"]:
        warnings.append(f"{count(found['above_zero'])} log-probs lie above 0, within rounding.")
    if found["at_lowest"] > max(10, found["tokens"] * 1e-5) and found["lowest"] < 0:
        warnings.append(
            f"{count(found['at_lowest'])} log-probs are exactly {figure(found['lowest'])}: they were cut off."
        )
    elif found["tokens"] >= TOKENS and found["lowest"] > NO_TAIL:
        warnings.append(
            f"None of {count(found['tokens'])} log-probs lies below {figure(found['lowest'])}: responses "
            "were sampled from a cut distribution (top_p, top_k, or a low temperature)."
        )
    charts = bars("Log-probs of tokens", found["token_histogram"], "nats", "tokens (a sample)", below=True)
    charts += bars("Mean log-prob of a row", found["row_mean"], "nats per token")
    return Section("Behavior log-probs", table, charts, (), warnings)


def text(facts: Facts) -> Section | None:
    found = facts["text"]
    table, warnings = [], list[str]()
    for side, scan in found["sides"].items():
        if scan["with_special"]:
            said = ", ".join(f"{token} ({count(n)})" for token, n in list(scan["special"].items())[:NAMES])
            table.append(Fact(f"special tokens in {side}", f"{count(scan['with_special'])} rows", said))
            warnings.append(
                f"{count(scan['with_special'])} rows have special tokens in the text of their {side}: a chat "
                "template would write them twice, or they would end the text early."
            )
        if scan["replacement_marks"]:
            table.append(
                Fact(f"broken characters in {side}", f"{count(scan['replacement_marks'])} rows", "U+FFFD")
            )
            warnings.append(
                f"{count(scan['replacement_marks'])} rows have U+FFFD in their {side}: a broken encoding."
            )
        if scan["blank"]:
            table.append(Fact(f"blank {side}", f"{count(scan['blank'])} rows"))
            warnings.append(f"{count(scan['blank'])} rows have a {side} of white space only.")
    repeated = found["repetition"]
    if repeated:
        what = {"prompts": "prompts", "preferences": "chosen answers"}.get(facts["kind"], "responses")
        table.append(Fact("repeated 4-grams", quantiles(repeated), f"of {count(repeated['n'])} {what}"))
        if found["repetitive_share"] > 0.02:
            warnings.append(
                f"{percent(found['repetitive_share'])} of the {what} repeat more than half of their 4-grams."
            )
    scanned = [count(scan["rows"]) + " " + side for side, scan in found["sides"].items()]
    searched = [f"Texts searched for special tokens: {', '.join(scanned)}."] if scanned else []
    drawn = repeated if repeated and repeated["max"] else None
    charts = bars("Repeated 4-grams", drawn, "share", "rows (a sample)")
    return Section("Text", table, charts, searched, warnings) if table or searched else None


def names(facts: Facts) -> Section | None:
    """Rows by policy, version, temperature, source."""
    table = []
    for column, found in facts["names"].items():
        shown = ", ".join(f"{name}: {count(n)}" for name, n in list(found["most"].items())[:NAMES])
        more = found["distinct"] - NAMES
        table.append(Fact(column, shown, f"and {more:,} more" if more > 0 else ""))
    return Section("Where the rows come from", table) if table else None
