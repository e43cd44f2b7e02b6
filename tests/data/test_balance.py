"""Groups of about equal cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rein.data.balance import balanced_groups, balanced_micro_batches, workload
from rein.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def test_the_largest_differencing_method_by_hand() -> None:
    """8 7 6 5 4 in two: 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2: sums 16 and 14."""
    found = balanced_groups([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][row] for row in group) for group in found) == [14, 16]


def test_groups_may_have_one_size() -> None:
    costs = [1, 2, 3, 4, 100, 101]
    found = balanced_groups(costs, 2, equal_size=True)
    assert [len(group) for group in found] == [3, 3]
    totals = [sum(costs[row] for row in group) for group in found]
    assert abs(totals[0] - totals[1]) <= 3


def test_work_grows_faster_than_length() -> None:
    assert workload(10) == 245860
    assert workload(2000) > 2 * workload(1000)


@given(costs=LENGTHS, groups=st.integers(1, 6))
def test_every_row_is_in_exactly_one_group(costs: list[int], groups: int) -> None:
    if groups > len(costs):
        with pytest.raises(ConfigError, match="give 1 to"):
            balanced_groups(costs, groups)
        return
    found = balanced_groups(costs, groups)
    assert len(found) == groups
    assert sorted(row for group in found for row in group) == list(range(len(costs)))
    assert all(group == sorted(group) and group for group in found)


@given(lengths=LENGTHS, budget=st.integers(60, 200), ends=st.booleans())
@settings(deadline=None)
def test_micro_batches_fit_the_budget_and_hold_every_row_once(
    lengths: list[int], budget: int, ends: bool
) -> None:
    found = balanced_micro_batches(lengths, budget, small_at_ends=ends)
    assert sorted(row for group in found for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in group) <= budget for group in found)


@given(pairs=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=10))
@settings(deadline=None)
def test_rows_that_belong_together_stay_together(pairs: list[tuple[int, int]]) -> None:
    lengths = [length for pair in pairs for length in pair]
    for group in balanced_micro_batches(lengths, 80, together=2):
        assert sum(lengths[row] for row in group) <= 80
        assert all(row + 1 in group for row in group if row % 2 == 0)


def test_the_largest_lies_in_the_middle() -> None:
    lengths = [50, 10, 40, 20, 30]
    sizes = [sum(lengths[row] for row in group) for group in balanced_micro_batches(lengths, 50)]
    middle = sizes.index(max(sizes))
    assert sizes == sorted(sizes[: middle + 1]) + sorted(sizes[middle + 1 :], reverse=True)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget: 10 is below the longest, 11"):
        balanced_micro_batches([3, 11], 10)
    with pytest.raises(ConfigError, match="no multiple of 2"):
        balanced_micro_batches([3, 1, 2], 10, together=2)
    with pytest.raises(ConfigError, match="do not divide"):
        balanced_groups([1, 2, 3], 2, equal_size=True)
    assert balanced_micro_batches([], 10) == []
