"""Facts of an audit in, sections out: the rows themselves, lengths, ends, copies, and shared prompts."""

from rein.report.section import Bars, Fact, Facts, Section, bars, count, ends, figure, percent, quantiles

OVER_LIMIT = ("prompt over the limit", "response over the limit")
FEW = 3  # files and reasons that are named
LONG_TAIL = 20  # times the median


def rows(facts: Facts) -> Section:
    """What the files are, and what the loader would make of their rows."""
    found, limit = facts["rows"], facts["limits"]["max_bad_fraction"]
    bad = sum(n for kind, n in found["by_reason"].items() if kind not in OVER_LIMIT)
    table = [Fact("kind", facts["kind"], _files(facts)), Fact("rows", count(found["total"]))]
    table.append(Fact("usable", count(found["usable"]), percent(found["usable"] / max(found["total"], 1))))
    warnings = []
    for kind, n in found["by_reason"].items():
        first = found["first"].get(kind, [])
        table.append(
            Fact(f"left out: {kind}", count(n), f"{first[0]['where']}: {first[0]['reason']}" if first else "")
        )
    if not found["usable"]:
        warnings.append(
            "No row can be used: training would refuse the file. If its columns or messages are laid out in "
            "another way, `rein convert` can map them."
        )
    elif bad > limit * found["total"]:
        warnings.append(
            f"{count(bad)} of {count(found['total'])} rows cannot be used: more than data.max_bad_fraction "
            f"({limit:g}) allows, so training would refuse the file."
        )
    ignored = sorted({name for file in facts["files"] for name in file["ignored"]})
    if ignored:
        table.append(Fact("columns nobody reads", ", ".join(ignored)))
    said = [f"{count(n)} rows: {what}." for what, n in found["noticed"].items()]
    if not facts["tokenizer"]:
        said.append(
            "No tokenizer was given: text is measured in characters, and neither its length in tokens, nor "
            "ids beyond the vocabulary, nor what a chat template refuses is checked. Give --model PATH."
        )
    charts = []
    if len(found["by_reason"]) > 1:
        charts.append(Bars("Rows left out", list(found["by_reason"]), list(found["by_reason"].values())))
    return Section("Rows", table, charts, said, warnings)


def lengths(facts: Facts) -> Section | None:
    table, charts, said, warnings = [], [], list[str](), list[str]()
    for side, found in facts["lengths"].items():
        unit, spread = found["unit"], found["distribution"]
        table.append(Fact(f"{side}, {unit}", quantiles(spread), ends(spread)))
        charts += bars(f"Length of {side}", spread, unit)
        if found["other_unit"]:
            said.append(f"{count(found['other_unit'])} rows of {side} are in the other unit and not shown.")
        if spread and spread["max"] > LONG_TAIL * max(spread["p50"], 1):
            warnings.append(
                f"The longest {side} has {figure(spread['max'])} {unit}, over {LONG_TAIL} times the median."
            )
    return Section("Lengths", table, charts, said, warnings) if table else None


def endings(facts: Facts) -> Section | None:
    """How responses end: an answer that was cut off teaches not to end."""
    found = facts["endings"]
    if not found:
        return None
    known = found["stop"] + found["length"]
    table = [Fact("finished", count(found["stop"]))] if known else []
    table += (
        [Fact("cut off by the limit", count(found["length"]), percent(found["truncated_share"]))]
        if known
        else []
    )
    if found["other"] + found["unknown"]:
        table.append(Fact("end unknown", count(found["unknown"]), f"{count(found['other'])} other reasons"))
    wall = found["at_longest"] / max(found["rows"], 1)
    table.append(
        Fact(f"longest, {found['unit']}", count(found["longest"]), f"{count(found['at_longest'])} rows")
    )
    said, warnings = [], []
    if (last := found["last_id"]) is not None:
        table.append(Fact("most frequent last id", str(last["id"]), percent(last["share"])))
    if found["missing_end"] is not None:
        share = found["missing_end"] / max(found["rows_with_ids"], 1)
        table.append(Fact("without end token", count(found["missing_end"]), percent(share)))
    if (found["truncated_share"] or 0) > 0.1:
        warnings.append(
            f"{percent(found['truncated_share'])} of the responses were cut off: they teach to go on, and "
            "their scores are of unfinished answers."
        )
    if not known and found["last_id"] and found["last_id"]["share"] < 0.9:
        said.append(
            "finish_reason is not stored and the last ids differ: many responses may have no end token."
        )
    cut = min(wall, 1 - found["stop"] / max(found["rows"], 1))  # what has finished met no limit
    if cut > 0.05 and found["longest"] > 1 and found["at_longest"] < found["rows"]:
        warnings.append(
            f"{percent(wall)} of the responses are exactly the longest there is: a generation limit."
        )
    return Section("Ends", table, (), said, warnings)


def duplicates(facts: Facts) -> Section | None:
    found = facts["duplicates"]
    if not facts["rows"]["usable"]:
        return None
    near = found["near"]
    table = [
        Fact("exact copies", count(found["copies"]), percent(found["copies_share"])),
        Fact("different prompts", count(found["distinct_prompts"])),
        Fact("near-duplicates", count(near["alike"]), f"of {count(near['compared'])} compared"),
    ]
    if found["most_copies"] > 1:
        table.insert(1, Fact("most copies of a row", count(found["most_copies"])))
    said = ["Near-duplicates share 80 % of their 5-grams (MinHash). In a sample, fewer meet than there are."]
    warnings = []
    if (found["copies_share"] or 0) > 0.01:
        warnings.append(
            f"{percent(found['copies_share'])} of the rows are exact copies of another. A sure policy "
            "repeats itself: the verdict, with --model, tells whether these are more than it would."
        )
    if (near["share"] or 0) > 0.05:
        warnings.append(f"{percent(near['share'])} of a sample are nearly another row's copy.")
    return Section("Copies", table, (), said, warnings)


def overlap(facts: Facts) -> Section | None:
    """Prompts that stand in the evaluation files too: what they measure is memory."""
    found = facts["overlap"]
    if not found:
        return None
    table = [
        Fact("evaluation prompts", count(found["against_prompts"]), ", ".join(found["against"][:FEW])),
        Fact("shared prompts", count(found["shared_prompts"]), f"{count(found['shared_rows'])} rows"),
    ]
    table += [Fact(example["where"], example["prompt"]) for example in found["examples"]]
    warnings = []
    if found["shared_prompts"]:
        warnings.append(
            f"{count(found['shared_prompts'])} prompts stand in the evaluation too: take them out of one."
        )
    return Section("Shared with the evaluation", table, (), (), warnings)


def _files(facts: Facts) -> str:
    names = [f"{file['name']} ({count(file['rows'])} rows)" for file in facts["files"]]
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more
