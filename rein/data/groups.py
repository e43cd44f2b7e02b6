"""Trajectories in, what belongs together out: the rows of a prompt, and its better and worse ones as pairs.

Reads groups and scores only; scores are constants of the file, so all of this is decided once.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rein.config.methods import DATA_NEEDS, asked_by, methods_for
from rein.config.recipe import Recipe
from rein.errors import ConfigError, DataError, shown
from rein.types import Trajectory


def by_prompt(rows: Sequence[Trajectory]) -> list[list[int]]:
    """Row numbers by prompt, in order of appearance."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    return list(groups.values())


def units(rows: Sequence[Trajectory], *, paired: bool, grouped: bool) -> list[list[int]]:
    """What one batch must hold whole: a pair (rows 2i and 2i + 1), a prompt's rows, or else a row."""
    if paired:
        return [[row, row + 1] for row in range(0, len(rows), 2)]
    return by_prompt(rows) if grouped else [[row] for row in range(len(rows))]


def longest_group(recipe: Recipe, rows: Sequence[Trajectory]) -> int:
    """Most rows that data.keep_groups holds together; 1 where it is off.

    Raises ConfigError where a mini-batch has no room for them.
    """
    if not recipe.data.keep_groups:
        return 1
    group = max(by_prompt(rows), key=len)
    most, prompt = len(group), shown(rows[group[0]].group)
    sizes = {"actor": recipe.actor.ppo_mini_batch_size, "critic": recipe.critic.ppo_mini_batch_size}
    for role, size in sizes.items():
        if size is not None and most > size:
            raise ConfigError(
                f"{role}.ppo_mini_batch_size {size}: prompt {prompt} has {most} rows, which data.keep_groups "
                f"holds in one mini-batch; set it to {most} or more, or write data.keep_groups=false"
            )
    return most


def with_spread(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Rows of prompts whose responses score differently; the others teach nothing.

    arXiv:2503.14476, eq. 11.
    """
    kept = [group for group in by_prompt(rows) if len({rows[i].score for i in group}) > 1]
    return [rows[i] for i in sorted(chain.from_iterable(kept))]


def best_against_worst(scores: Sequence[float]) -> list[tuple[int, int]]:
    """Of a prompt's n responses the floor(n / 2) best meet as many of the worst, in order.

    A row is in one pair at most, and responses that score the same make none.
    """
    ranked = sorted(range(len(scores)), key=lambda i: -scores[i])
    half = len(ranked) // 2
    met = zip(ranked[:half], ranked[len(ranked) - half :], strict=True)
    return [(better, worse) for better, worse in met if scores[better] != scores[worse]]


def pairs(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Better and worse responses to a prompt, one after the other: rows 2i and 2i + 1 are a pair.

    Best against worst; responses that are the same make no pair.
    """
    found: list[Trajectory] = []
    for group in by_prompt(rows):
        for better, worse in best_against_worst([rows[i].score or 0.0 for i in group]):
            one, other = rows[group[better]], rows[group[worse]]
            if not np.array_equal(one.response_ids, other.response_ids):
                found += [one, other]
    return found


def select(
    rows: Sequence[Trajectory],
    file: str,  # for messages
    *,
    threshold: float | None,  # only rows that score at least this
    spread: bool,  # only prompts whose responses score differently
    paired: bool,
) -> tuple[list[Trajectory], dict[str, int]]:
    """The rows that are trained on, and how many were left out for what.

    Raises DataError when none is left.
    """
    kept, left_out = list(rows), dict[str, int]()
    if threshold is not None:
        kept = [row for row in rows if row.score is not None and row.score >= threshold]
        left_out["filtered"] = len(rows) - len(kept)
        if not kept:
            raise DataError(f"{file}: no row scores {threshold} or more; lower algorithm.filter_threshold")
    if spread:
        different = with_spread(kept)
        left_out["in_groups_without_spread"] = len(kept) - len(different)
        kept = different
        if not kept:
            raise DataError(
                f"{file}: every prompt's responses score the same; set algorithm.filter_groups.enable=false"
            )
    if paired:
        both = pairs(kept)
        left_out["unpaired"] = len(kept) - len(both)
        kept = both
        if not kept:
            raise DataError(
                f"{file}: no prompt has two responses that score differently, so there is no pair; choose "
                "another algorithm.method, or score more responses"
            )
    return kept, left_out


def refuse_lacking(recipe: Recipe, file: str, rows: Sequence[Trajectory]) -> None:
    """Raise DataError where the recipe asks for what the rows do not have, with the methods they serve."""
    has, asked = _has(rows), asked_by(recipe)
    lacking = next((name for name in DATA_NEEDS if name in asked and name not in has), None)
    if lacking is None:
        return
    several = len(asked[lacking]) > 1
    lead = f"{file}: {' and '.join(asked[lacking])} {'need' if several else 'needs'}"
    do = f"change {'these keys' if several else 'this key'}"
    serves = f"the rows can serve algorithm.method={'|'.join(methods_for(has))}"
    if lacking != "behavior":
        raise DataError(f"{lead} {DATA_NEEDS[lacking]}; store them, or {do}; {serves}")
    if recipe.data.behavior == "unknown":
        raise DataError(f"{lead} behavior_log_probs, but data.behavior is unknown; {do}; {serves}")
    without = sum(row.behavior_log_probs is None for row in rows)
    count = f"({without} of {len(rows)} rows have none)"
    raise DataError(f"{lead} {DATA_NEEDS[lacking]} {count}; store them, or {do}; {serves}")


def _has(rows: Sequence[Trajectory]) -> frozenset[str]:
    """Which of DATA_NEEDS all rows meet (of groups and pairs: whether there are any)."""
    groups = by_prompt(rows)
    met = {
        "behavior": all(row.behavior_log_probs is not None for row in rows),
        "groups": any(len(group) > 1 for group in groups),
        "baseline_score": all(row.baseline_score is not None for row in rows),
        "pairs": any(len({rows[i].score for i in group}) > 1 for group in groups),
    }
    return frozenset(name for name, value in met.items() if value)
