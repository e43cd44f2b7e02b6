"""Claims about the hold-out."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rein.data.split import held_prompts, holdout
from rein.types import Ids


@dataclass(frozen=True)
class Row:
    prompt_ids: Ids
    answer: int


def rows(prompts: int, answers: int = 3) -> list[Row]:
    return [Row(np.array([7, prompt]), answer) for answer in range(answers) for prompt in range(prompts)]


def prompts_of(some: list[Row]) -> set[int]:
    return {int(row.prompt_ids[1]) for row in some}


@pytest.mark.parametrize(
    ("prompts", "fraction", "held"),
    [
        (10_000, 0.05, 500),
        (4_000, 0.05, 200),
        (1_000, 0.05, 64),
        (128, 0.05, 64),
        (20, 0.05, 10),
        (1, 0.05, 0),
        (0, 0.05, 0),
        (4_000, 0.0, 0),
    ],
)
def test_the_share_is_held_out_but_at_least_64_and_at_most_500_prompts_and_half(
    prompts: int, fraction: float, held: int
) -> None:
    assert held_prompts(prompts, fraction) == held


@settings(max_examples=30)
@given(prompts=st.integers(0, 200), answers=st.integers(1, 3), seed=st.integers(0, 5))
def test_every_row_falls_on_one_side_and_no_prompt_on_both(prompts: int, answers: int, seed: int) -> None:
    given_rows = rows(prompts, answers)
    train, held = holdout(given_rows, 0.05, seed)
    assert len(train) + len(held) == len(given_rows)
    assert not prompts_of(train) & prompts_of(held)
    assert len(prompts_of(held)) == held_prompts(prompts, 0.05)
    assert [row for row in given_rows if any(row is kept for kept in train)] == train


def test_the_split_follows_from_seed_and_prompts_not_from_the_order_or_number_of_rows() -> None:
    held = prompts_of(holdout(rows(300), 0.05, 1)[1])
    assert prompts_of(holdout(rows(300)[::-1], 0.05, 1)[1]) == held
    assert prompts_of(holdout(rows(300, answers=1), 0.05, 1)[1]) == held
    assert prompts_of(holdout(rows(300), 0.05, 2)[1]) != held
