"""Rows of a prompt, and pairs of better and worse ones."""

import dataclasses

import pytest
from rows_made import random_trajectories

from rein.config.load import load
from rein.data.groups import by_prompt, pairs, refuse_lacking, select, units, with_spread
from rein.errors import DataError
from rein.types import Trajectory


def rows(*scores: tuple[str, float]) -> list[Trajectory]:
    made = random_trajectories(len(scores))
    return [
        dataclasses.replace(row, group=group, score=score)
        for row, (group, score) in zip(made, scores, strict=True)
    ]


MIXED = rows(("a", 1), ("b", 0), ("a", 0), ("b", 0), ("a", 0.5), ("a", 1), ("c", 1))


def test_rows_of_a_prompt_are_found_in_any_order() -> None:
    assert by_prompt(MIXED) == [[0, 2, 4, 5], [1, 3], [6]]
    assert units(MIXED, paired=False, grouped=True) == by_prompt(MIXED)
    assert units(MIXED[:4], paired=True, grouped=False) == [[0, 1], [2, 3]]
    assert units(MIXED[:2], paired=False, grouped=False) == [[0], [1]]


def test_prompts_whose_responses_score_the_same_teach_nothing() -> None:
    assert with_spread(MIXED) == [MIXED[0], MIXED[2], MIXED[4], MIXED[5]]


def test_the_best_meet_the_worst_and_equals_make_no_pair() -> None:
    assert pairs(MIXED) == [MIXED[0], MIXED[4], MIXED[5], MIXED[2]]
    assert pairs(rows(("a", 1), ("a", 0), ("a", 0), ("a", 0)))[0].score == 1
    assert len(pairs(rows(("a", 1), ("a", 0), ("a", 0), ("a", 0)))) == 2
    assert pairs(rows(("a", 1), ("a", 1), ("b", 0))) == []


def test_a_file_of_preferences_gives_its_own_pairs_back() -> None:
    stored = rows(("a", 1), ("a", 0), ("a", 1), ("a", 0))
    assert pairs(stored) == stored


def test_what_is_left_out_is_counted() -> None:
    kept, left_out = select(MIXED, "f", threshold=0.5, spread=True, paired=True)
    assert [row.score for row in kept] == [1, 0.5]
    assert left_out == {"filtered": 3, "in_groups_without_spread": 1, "unpaired": 1}
    with pytest.raises(DataError, match="f: no row scores 2 or more"):
        select(MIXED, "f", threshold=2, spread=False, paired=False)
    with pytest.raises(DataError, match="every prompt's responses score the same"):
        select(rows(("a", 1), ("a", 1)), "f", threshold=None, spread=True, paired=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "actor.kl_loss_type=off_policy",
            "actor.kl_loss_type=off_policy needs behavior_log_probs in every row",
        ),
        (
            "algorithm.method=topr actor.policy_loss.opsm_threshold=0.5",
            "actor.policy_loss.loss_mode=topr and actor.policy_loss.opsm_threshold=0.5 need",
        ),
        ("algorithm.adv_estimator=vtrace data.behavior=unknown", "vtrace needs behavior_log_probs, but data"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator=grpo needs two or more scored responses"),
    ],
)
def test_what_rows_lack_is_said_with_the_keys_that_ask_for_it(words: str, said: str) -> None:
    lacking = [dataclasses.replace(row, behavior_log_probs=None) for row in rows(("a", 0.0), ("b", 1.0))]
    with pytest.raises(DataError) as caught:
        refuse_lacking(load(None, words.split())[0], "rows.parquet", lacking)
    assert str(caught.value).startswith("rows.parquet: ")
    assert said in str(caught.value)
    assert "the rows can serve algorithm.method=ppo|" in str(caught.value)


def test_the_same_response_makes_no_pair() -> None:
    one = rows(("a", 1), ("a", 0))
    assert pairs([one[0], dataclasses.replace(one[0], score=0.0)]) == []
