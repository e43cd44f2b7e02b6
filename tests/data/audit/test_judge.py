"""A verdict follows from few numbers, each with its limit; they are counted here by hand."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from rows_made import random_trajectories

from rein.data.audit.evidence import contradictions, copies, evidence_of, length_correlation
from rein.data.audit.verdict import Evidence, judge
from rein.data.split import prompt_key
from rein.types import Trajectory

FINE = Evidence("trajectories", rows=1000, prompts=100, scored=1000, scores=2)
DATA = "data.leave_out"


@pytest.mark.parametrize(
    ("changes", "decision", "finding", "settings"),
    [
        ({}, "train", None, {}),
        ({"rows": 127}, "stop", "too few", {}),
        ({"shared": 900, "shared_files": ("t",)}, "stop", "too few", {DATA: ["t"]}),
        ({"prompts": 15}, "stop", "too few", {}),
        ({"scored": 0, "scores": 0}, "stop", "no score", {}),
        ({"scores": 1}, "stop", "no spread", {}),
        ({"kind": "prompts"}, "stop", "no answers", {}),
        ({"kind": "sft"}, "stop", "no answers", {}),
        ({"shared": 3, "shared_files": ("t.parquet",)}, "limits", "leaked", {DATA: ["t.parquet"]}),
        ({"contradictions": 0.06}, "train", "reward noise", {}),
        ({"contradictions": 0.04}, "train", None, {}),
        ({"length": -0.6}, "train", "length", {}),
        ({"length": 0.4}, "train", None, {}),
    ],
)
def test_each_limit_has_its_verdict(
    changes: dict[str, Any], decision: str, finding: str | None, settings: dict[str, Any]
) -> None:
    found = judge(FINE._replace(**changes))
    assert (found.decision, found.settings, found.method) == (decision, settings, "ppo")
    also = ["leaked"] if "shared" in changes and finding != "leaked" else []
    assert [reason.finding for reason in found.reasons] == ([finding] if finding else []) + also
    said = found.as_json()
    assert said["tone"] == {"train": "good", "limits": "even", "stop": "bad"}[decision]
    assert ("auto follows" in said["sentences"][-1]) == (decision != "stop")


def test_pairs_are_for_dpo() -> None:
    found = judge(FINE._replace(kind="preferences", scored=0, scores=0))
    assert (found.decision, found.method) == ("train", "dpo")


def answers(tokens: str, p: float, scores: list[float] | None = None) -> list[Trajectory]:
    """Answers of one token to one prompt, each letter an answer, all of probability p."""
    (base,) = random_trajectories(1)
    return [
        dataclasses.replace(
            base,
            response_ids=np.array([ord(letter)]),
            response_mask=np.array([True]),
            behavior_log_probs=np.array([math.log(p)], dtype=np.float32),
            score=1.0 if scores is None else scores[i],
        )
        for i, letter in enumerate(tokens)
    ]


def test_copies_are_repeats_beyond_what_sampling_makes() -> None:
    assert copies({"a": answers("aaab", 0.75)}) == 0  # 3 of 4 are expected
    # 8 of 10 where the other 2 let expect 2 (.1 / .9): 7 - .222 of 10 rows
    assert copies({"a": answers("aaaaaaaabc", 0.1)}) == pytest.approx((7 - 2 / 9) / 10)
    unknown = [dataclasses.replace(row, behavior_log_probs=None) for row in answers("aaaaaaaabc", 0.1)]
    assert copies({"a": unknown}) == 0


def test_equal_answers_that_score_differently_are_contradictions() -> None:
    assert contradictions({"a": answers("abc", 0.3)}) is None
    # a: pairs 1-0, 1-1, 0-1; b: one pair that agrees
    found = contradictions({"a": answers("aaabb", 0.3, [1, 0, 1, 0, 0])})
    assert found == pytest.approx(2 / 4)
    assert contradictions({"a": answers("a", 0.3, [1]), "b": answers("a", 0.3, [0])}) is None


def test_length_counts_within_a_prompt_only() -> None:
    rows = answers("ab", 0.3, [0, 1])
    longer = dataclasses.replace(
        rows[1], response_ids=np.array([1, 2, 3]), response_mask=np.array([True, True, True])
    )
    assert length_correlation({"a": [rows[0], longer]}) == pytest.approx(1)
    # long answers to one prompt score high, but all of them: nothing follows
    assert length_correlation({"a": [longer, longer], "b": [rows[0], rows[0]]}) is None


def test_evidence_counts_prompts_and_what_the_evaluation_asks_too() -> None:
    rows = random_trajectories(6)
    asked = {prompt_key(row.prompt_ids) for row in rows[:2]}
    found = evidence_of("trajectories", rows, evaluation=asked, evaluation_files=["t.parquet"])
    assert (found.rows, found.shared, found.shared_files) == (6, 2, ("t.parquet",))
    none = evidence_of("trajectories", rows, evaluation=(), evaluation_files=["t.parquet"])
    assert (none.shared, none.shared_files) == (0, ())


def test_rows_of_which_some_have_log_probs_use_none() -> None:
    found = judge(FINE._replace(known=999))
    assert (found.decision, found.settings) == ("limits", {"data.behavior": "unknown"})
    assert [reason.finding for reason in found.reasons] == ["some log-probs"]
    assert judge(FINE._replace(known=999), recomputed=True).decision == "train"
    assert judge(FINE._replace(known=1000)).decision == "train"
