"""Claims about orders and batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows_made import Row, row

from rein.data.batches import (
    chunks,
    epoch_order,
    even_cuts,
    micro_batches,
    mini_batch_count,
    over_budget,
    row_batches,
)
from rein.errors import ConfigError
from rein.sharing import PAYS_FROM, families

LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def test_a_row_above_the_budget_is_alone_and_named() -> None:
    assert micro_batches([3, 21, 4], 10) == [[1], [2, 0]]
    assert over_budget([3, 21, 4], 10) == [1]


def test_a_row_as_long_as_the_budget_fits() -> None:
    assert micro_batches([10, 10], 10) == [[0], [1]]
    assert over_budget([10, 10], 10) == []


@given(lengths=LENGTHS, budget=st.integers(1, 70), max_rows=st.none() | st.integers(1, 5))
def test_every_row_is_in_exactly_one_micro_batch_that_fits(
    lengths: list[int], budget: int, max_rows: int | None
) -> None:
    groups = micro_batches(lengths, budget, max_rows)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert group
        assert sum(lengths[row] for row in group) <= budget or len(group) == 1
        assert max_rows is None or len(group) <= max_rows


@given(lengths=LENGTHS, budget=st.integers(1, 70))
def test_rows_of_like_length_lie_together(lengths: list[int], budget: int) -> None:
    groups = [[lengths[row] for row in group] for group in micro_batches(lengths, budget)]
    for longer, shorter in itertools.pairwise(groups):
        assert min(longer) >= max(shorter)


SHARED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=40)


def of_prompts(drawn: list[tuple[int, int]]) -> list[Row]:
    """Rows of up to four prompts, the last of which is too short to be shared."""
    prompts = [[p] * (PAYS_FROM + 4 * p) for p in range(3)] + [[9]]
    return [row(prompts[p], [1] * answer) for p, answer in drawn]


def tokens(rows: list[Row], share: bool) -> int:
    parts = families(rows) if share else [[i] for i in range(len(rows))]
    return sum(len(rows[f[0]].prompt_ids) + sum(len(rows[i].response_ids) for i in f) for f in parts)


@given(SHARED, st.integers(1, 120), st.none() | st.integers(1, 5), st.booleans())
def test_every_row_is_in_exactly_one_row_batch_that_fits_with_its_prompt_counted_once(
    drawn: list[tuple[int, int]], budget: int, max_rows: int | None, share: bool
) -> None:
    rows = of_prompts(drawn)
    groups = row_batches(rows, budget, share=share, max_rows=max_rows)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        some = [rows[i] for i in group]
        assert group
        assert len(group) == 1 or tokens(some, share) <= budget
        assert max_rows is None or len(group) <= max_rows


def test_rows_of_a_prompt_lie_together_and_are_parted_only_where_they_do_not_fit() -> None:
    rows = of_prompts([(0, 10), (1, 5), (0, 10), (1, 5)])  # prompts of 16 and 20 tokens
    assert sorted(map(sorted, row_batches(rows, 40, share=True))) == [[0, 2], [1, 3]]
    assert len(row_batches(rows, 70, share=True)) == 1
    assert len(row_batches(rows, 70, share=False)) == 2
    assert sorted(map(len, row_batches(rows, 30, share=True))) == [1, 1, 2]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 120))
def test_row_batches_are_few_and_of_about_one_length(lengths: list[int], budget: int) -> None:
    rows = [row([1], [1] * (length - 1)) for length in lengths]
    sizes = [sum(lengths[i] for i in group) for group in row_batches(rows, budget, share=False)]
    assert len(sizes) <= max(-(-2 * sum(lengths) // budget), 1)
    assert max(sizes) - min(sizes) <= max(lengths)


@pytest.mark.parametrize(("budget", "max_rows"), [(0, None), (-1, None), (5, 0)])
def test_a_micro_batch_size_of_nothing_is_refused_and_never_hangs(budget: int, max_rows: int | None) -> None:
    with pytest.raises(ConfigError, match="give 1 or more"):
        micro_batches([1, 2], budget, max_rows)
    with pytest.raises(ConfigError, match="give 1 or more"):
        row_batches(of_prompts([(0, 1)]), budget, share=True, max_rows=max_rows)


@pytest.mark.parametrize(("rows", "size", "sizes"), [(6, 4, [4, 2]), (4, 4, [4]), (2, 4, [2]), (0, 4, [])])
def test_a_batch_size_that_does_not_divide_drops_nothing(rows: int, size: int, sizes: list[int]) -> None:
    parts = chunks(range(rows), size)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(rows))


def test_a_batch_size_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch size: 0 rows; give 1 or more"):
        chunks(range(4), 0)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    first = epoch_order(8, 1, 0, True)
    np.random.default_rng(0).random(5)
    np.random.seed(3)
    np.random.rand(7)  # an evaluation that draws from the global generator
    assert epoch_order(8, 1, 0, True) == first
    assert sorted(first) == list(range(8))
    assert epoch_order(8, 2, 0, True) != first
    assert epoch_order(8, 1, 1, True) != first


def test_the_orders_of_seeds_and_epochs_are_pinned() -> None:
    """A resumed run must see the order of the run it goes on from, whatever the version."""
    assert epoch_order(8, 1, 0, True) == [5, 2, 3, 7, 1, 0, 6, 4]


def test_without_shuffling_rows_keep_their_order() -> None:
    assert epoch_order(4, 1, 3, False) == [0, 1, 2, 3]


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=30)


@given(sizes=SIZES, size=st.integers(5, 12))
def test_groups_stay_whole_in_mini_batches_that_differ_by_less_than_two_groups(
    sizes: list[int], size: int
) -> None:
    ends = list(itertools.accumulate(sizes))
    units = [list(range(end - n, end)) for n, end in zip(sizes, ends, strict=True)]
    count = mini_batch_count(ends[-1], size, max(sizes))
    found = even_cuts(units, count)
    assert [row for part in found for row in part] == list(range(ends[-1]))
    assert {tuple(unit) for unit in units} == {
        tuple(unit) for part in found for unit in units if set(unit) <= set(part)
    }
    assert all(abs(len(part) - ends[-1] / count) < 2 * max(sizes) for part in found)
    assert all(found)


def test_rows_alone_make_as_many_mini_batches_as_before() -> None:
    assert [mini_batch_count(rows, 4) for rows in (1, 4, 5, 12)] == [1, 1, 2, 3]
