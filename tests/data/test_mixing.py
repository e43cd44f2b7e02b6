"""Demonstrations join updates at the share asked for, each in turn, from a cursor that is one number."""

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows_made import random_rows

from rein.data.mixing import Mixing
from rein.types import Demonstration

ROWS = [
    Demonstration(
        f"row {i}", row.prompt_ids, row.response_ids, np.ones(len(row.response_ids), dtype=np.bool_)
    )
    for i, row in enumerate(random_rows(7))
]


def mixing(share: float, rows: list[Demonstration] = ROWS) -> Mixing:
    return Mixing(rows, share, seed=3, shuffle=True)


def taken(some: Mixing, sizes: list[int]) -> list[list[str]]:
    found = []
    for size in sizes:
        found.append([row.where for row in some.beside(size)])
        some.advance(size)
    return found


def test_what_a_fraction_leaves_is_carried_on() -> None:
    assert [len(rows) for rows in taken(mixing(0.05), [30, 30, 30, 10])] == [1, 2, 1, 1]
    assert [len(rows) for rows in taken(mixing(0.05), [8] * 5)] == [0, 0, 1, 0, 1]


@given(
    share=st.sampled_from([0.05, 0.1, 0.29, 1 / 3, 0.7, 1.0]),
    sizes=st.lists(st.integers(1, 300), max_size=30),
)
def test_any_mini_batches_take_the_floor_of_the_share_in_all(share: float, sizes: list[int]) -> None:
    counts = [len(rows) for rows in taken(mixing(share), sizes)]
    assert sum(counts) == floor(Fraction(repr(share)) * sum(sizes))
    carry = Fraction(0)
    for count, size in zip(counts, sizes, strict=True):
        carry += Fraction(repr(share)) * size
        assert count == floor(carry)
        carry -= count


def test_each_demonstration_comes_once_before_any_comes_again() -> None:
    flat = [where for rows in taken(mixing(0.5), [5] * 9) for where in rows]
    assert len(flat) == 22
    for epoch in range(3):
        assert sorted(flat[7 * epoch : 7 * epoch + 7]) == [row.where for row in ROWS]
    assert flat[:7] != flat[7:14]


def test_looking_takes_nothing_and_the_cursor_is_the_rows_seen() -> None:
    one, other = mixing(0.4), mixing(0.4)
    assert [row.where for row in one.beside(9)] == [row.where for row in one.beside(9)]
    taken(one, [9, 4])
    other.seen = one.seen
    assert other.seen == 13
    assert taken(one, [50]) == taken(other, [50])


@pytest.mark.parametrize("rows", [ROWS[1:], [ROWS[1], ROWS[0], *ROWS[2:]]], ids=["one less", "other order"])
def test_other_rows_have_another_mark(rows: list[Demonstration]) -> None:
    assert mixing(0.1, rows).mark() != mixing(0.1).mark() == mixing(0.9).mark()
