"""Costs of rows in, groups of row numbers out: groups of about equal cost, and micro-batches made of them.

Every row is in exactly one group. The numbers are those of verl's seqlen_balancing. Knows only numbers: no
torch, no models.
"""

import heapq
from collections.abc import Sequence

from rein.errors import ConfigError

# A group: its cost, how many rows, and (row, cost) of each in the order they came.
_Group = tuple[int, int, list[tuple[int, int]]]
LINEAR_COST = 24576  # 12 x hidden size / 2 at 4096: what a token costs beside attention


def workload(length: int) -> int:
    """24576 L + L^2: about the work of a transformer on a row of L tokens (verl's constants, a 7B model)."""
    return LINEAR_COST * length + length * length


def balanced_groups(costs: Sequence[int], groups: int, *, equal_size: bool = False) -> list[list[int]]:
    """Rows in `groups` groups of nearly equal cost: the largest differencing method (Karmarkar and Karp
    1982).

    Partial solutions lie in a heap by their spread; the two of largest spread are joined, the cheapest group
    of one with the dearest of the other. Row numbers ascend in each group. `equal_size` gives each group the
    same number of rows. Raises ConfigError where there are too few rows, or not a multiple of `groups` of
    them.
    """
    if not 0 < groups <= len(costs):
        raise ConfigError(f"balance: {len(costs)} rows in {groups} groups; give 1 to {len(costs)} groups")
    if equal_size and len(costs) % groups:
        raise ConfigError(f"balance: {len(costs)} rows do not divide into {groups} groups of one size")
    ascending = sorted((cost, row) for row, cost in enumerate(costs))
    step = groups if equal_size else 1
    heap = []
    for begin in range(0, len(ascending), step):
        alone: list[_Group] = [(cost, 1, [(row, cost)]) for cost, row in ascending[begin : begin + step]]
        heap.append(_entry(alone + [(0, 0, []) for _ in range(groups - len(alone))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        heapq.heappush(heap, _entry([_joined(a, b) for a, b in zip(first, reversed(second), strict=True)]))
    return [sorted(row for row, _ in members) for _, _, members in heap[0][-1]]


def _joined(one: _Group, other: _Group) -> _Group:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _entry(found: list[_Group]) -> tuple[int, int, int, list[tuple[int, int]], list[_Group]]:
    """A partial solution as a heap wants it: widest spread first, then the dearest group."""
    found.sort(reverse=True)
    cost, size, members = found[0]
    return found[-1][0] - cost, -cost, -size, [(-row, -c) for row, c in members], found


def balanced_micro_batches(
    lengths: Sequence[int],
    budget: int,
    *,
    small_at_ends: bool = True,
    together: int = 1,
) -> list[list[int]]:
    """Micro-batches of nearly equal work whose tokens fit the budget, as few as such groups can be.

    `together` keeps each so many consecutive rows in one micro-batch (the two of a pair). `small_at_ends`:
    the largest in the middle. Raises ConfigError for a row, or rows kept together, above the budget.
    """
    if len(lengths) % together:
        raise ConfigError(f"balance: {len(lengths)} rows are no multiple of {together} kept together")
    spans = [range(begin, begin + together) for begin in range(0, len(lengths), together)]
    tokens = [sum(lengths[row] for row in span) for span in spans]
    costs = [sum(workload(lengths[row]) for row in span) for span in spans]
    if not tokens:
        return []
    if max(tokens) > budget:
        raise ConfigError(f"token budget: {budget} is below the longest, {max(tokens)}; raise it")
    count = min(len(tokens), max(1, -(-sum(tokens) // budget)))
    while True:
        found = [group for group in balanced_groups(costs, count) if group]
        if all(sum(tokens[span] for span in group) <= budget for group in found):
            break
        count += 1
    if small_at_ends:
        found.sort(key=lambda group: (sum(costs[span] for span in group), group[0]), reverse=True)
        found = found[::2][::-1] + found[1::2]
    return [[row for span in group for row in spans[span]] for group in found]
