"""Loaded rows in, the few numbers that a verdict is made of out. Reads no file and no model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rein.data.audit.verdict import Evidence
from rein.data.schemas import Kind
from rein.data.split import prompt_key
from rein.types import Trajectory

UNLIKELY = 0.02
Groups = dict[str, list[Trajectory]]  # by prompt


def evidence_of(
    kind: Kind,
    rows: Sequence[Trajectory],
    *,
    evaluation: Collection[str] = (),  # prompt keys of what is measured on
    evaluation_files: Sequence[str] = (),
) -> Evidence:
    """`rows`: those that the loader lets through."""
    groups: Groups = defaultdict(list)
    for row in rows:
        groups[prompt_key(row.prompt_ids)].append(row)
    scores = [row.score for row in rows if row.score is not None]
    shared = sum(len(own) for key, own in groups.items() if key in evaluation)
    return Evidence(
        kind=kind,
        rows=len(rows),
        prompts=len(groups),
        scored=len(scores),
        scores=len(set(scores)),
        known=sum(row.behavior_log_probs is not None for row in rows),
        copies=copies(groups),
        answers=int(np.median([len(own) for own in groups.values()])) if groups else 0,
        contradictions=contradictions(groups),
        length=length_correlation(groups),
        shared=shared,
        shared_files=tuple(evaluation_files) if shared else (),
    )


def evidence_in(facts: Mapping[str, Any], evaluation_files: Sequence[str] = ()) -> Evidence:
    """What the structural facts of a file (run.FACTS) tell alone, without a model."""
    usable, score, overlap = facts["rows"]["usable"], facts["score"], facts["overlap"]
    shared = overlap["shared_rows"] if overlap else 0
    spread = score and score["distribution"] and score["distribution"]["max"] > score["distribution"]["min"]
    return Evidence(
        kind=facts["kind"],
        rows=usable,
        prompts=facts["duplicates"]["distinct_prompts"],
        scored=usable - score["missing"] if score else 0,
        scores=2 if spread else 1,
        shared=shared,
        shared_files=tuple(evaluation_files) if shared else (),
    )


def copies(groups: Groups) -> float:
    """The share of rows that repeat an answer to their prompt more often than sampling would.

    m of a prompt's n answers are equal, of probability p. Where m or more of n are unlikely (below UNLIKELY,
    binomial) the other n - m let expect (n - m) p / (1 - p) of them, and the rest are copies. Where p is not
    known nothing is called a copy: a sure policy repeats itself.
    """
    excess = 0.0
    for own in groups.values():
        for same in _equal(own).values():
            n, m, first = len(own), len(same), same[0]
            if m == 1 or first.behavior_log_probs is None:
                continue
            p = math.exp(float(first.behavior_log_probs[first.response_mask].sum(dtype=np.float64)))
            if _at_least(m, n, p) < UNLIKELY:
                excess += max(m - 1 - (n - m) * p / (1 - p), 0.0)
    return excess / max(sum(map(len, groups.values())), 1)


def _at_least(m: int, n: int, p: float) -> float:
    """P(X >= m) for X ~ Binomial(n, p)."""
    if p >= 1 or m <= 0:
        return 1.0
    if p <= 0:
        return 0.0
    ways = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(m, n + 1))
    terms = (way + k * math.log(p) + (n - k) * math.log1p(-p) for k, way in enumerate(ways, m))
    return min(sum(map(math.exp, terms)), 1.0)


def contradictions(groups: Groups) -> float | None:
    """Of the pairs of equal answers to a prompt, the share that scores differently; None without a pair."""
    pairs = differ = 0
    for own in groups.values():
        for same in _equal(own).values():
            scores = [row.score for row in same if row.score is not None]
            n = len(scores)
            pairs += n * (n - 1) // 2
            equal = sum(scores.count(score) * (scores.count(score) - 1) // 2 for score in set(scores))
            differ += n * (n - 1) // 2 - equal
    return differ / pairs if pairs else None


def length_correlation(groups: Groups) -> float | None:
    """Pearson's r of score and tokens, each less its prompt's mean; None where either never differs."""
    scores, lengths = [], []
    for own in groups.values():
        scored = [(row.score, int(row.response_mask.sum())) for row in own if row.score is not None]
        if len(scored) > 1:
            found = np.array(scored, dtype=np.float64)
            found -= found.mean(0)
            scores.append(found[:, 0])
            lengths.append(found[:, 1])
    if not scores:
        return None
    s, t = np.concatenate(scores), np.concatenate(lengths)
    spread = float(np.sqrt((s @ s) * (t @ t)))
    return float(s @ t) / spread if spread > 0 else None


def _equal(rows: Sequence[Trajectory]) -> dict[bytes, list[Trajectory]]:
    same: dict[bytes, list[Trajectory]] = defaultdict(list)
    for row in rows:
        same[np.asarray(row.response_ids, dtype=np.int64).tobytes()].append(row)
    return same
