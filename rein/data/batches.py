"""Numbers of rows in, lists of row numbers out: the order of an epoch, mini-batches, micro-batches.

Every row is in exactly one list. Knows only counts and lengths; draws from no global generator, so nothing
else that runs can disturb an order.
"""

import hashlib
import heapq
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from rein.errors import ConfigError
from rein.protocols import Mesh
from rein.sharing import families
from rein.types import TokenRow

Entry = TypeVar("Entry")


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The order of n rows in an epoch: it follows from seed and epoch alone."""
    if not shuffle:
        return list(range(n))
    digest = hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return [int(row) for row in generator.permutation(n)]


def epoch_batches(
    units: Sequence[Sequence[int]], size: int, seed: int, epoch: int, shuffle: bool
) -> list[list[int]]:
    """The batches of an epoch, about `size` rows each; the rows of a unit (a pair, a prompt's) together.

    Units of one length that divides `size` fill every batch but the last; others are cut where a unit ends,
    into equally many batches in each epoch. Raises ConfigError for a unit that no batch can hold.
    """
    order = [units[i] for i in epoch_order(len(units), seed, epoch, shuffle)]
    rows = [row for unit in order for row in unit]
    longest = max((len(unit) for unit in units), default=1)
    if size % longest == 0 and all(len(unit) == longest for unit in units):
        return chunks(rows, size)
    count = -(-len(rows) // size)
    if longest > len(rows) // count:
        raise ConfigError(
            f"data.train_batch_size {size}: a prompt has {longest} rows, which must lie in one "
            f"of {count} batches of {len(rows)} rows; raise it"
        )
    return even_cuts(order, count)


def even_cuts(units: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The units in their order as `count` lists of about as many rows, cut where a unit ends.

    None is empty where no unit has more than a `count`-th of the rows.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    total, begin = sum(map(len, units)), 0
    for unit in units:
        found[begin * count // total] += unit
        begin += len(unit)
    return found


def mini_batch_count(rows: int, size: int, longest: int = 1) -> int:
    """How many mini-batches of about `size` rows there are, where up to `longest` rows stay together."""
    return max(1, min(-(-rows // size), rows // longest))


def chunks(order: Sequence[Entry], size: int) -> list[list[Entry]]:
    """The order cut into pieces of `size`; the last holds what is left, so nothing is dropped."""
    if size < 1:
        raise ConfigError(f"batch size: {size} rows; give 1 or more")
    return [list(order[start : start + size]) for start in range(0, len(order), size)]


def micro_batches(lengths: Sequence[int], budget: int, max_rows: int | None = None) -> list[list[int]]:
    """Rows grouped so that a group's tokens fit the budget; longest first, so that like lengths lie together.

    A row above the budget is alone in its group (`over_budget` names such rows). Raises ConfigError for a
    budget or `max_rows` below 1, which no row could fit.
    """
    if budget < 1:
        raise ConfigError(f"token budget: {budget}; give 1 or more")
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"micro-batch size: {max_rows} rows; give 1 or more")
    groups: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        full = (
            not groups
            or used + lengths[row] > budget
            or (max_rows is not None and len(groups[-1]) >= max_rows)
        )
        if full:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += lengths[row]
    return groups


def row_batches(
    rows: Sequence[TokenRow],
    budget: int,
    *,
    share: bool,  # rows of one prompt compute it once: they lie together and it is counted once
    max_rows: int | None = None,
    ranks: int = 1,  # whose number divides that of the micro-batches, where there are rows enough
) -> list[list[int]]:
    """Micro-batches whose tokens fit the budget, as few as can be and about equally long, longest first.

    A row above the budget is alone. Raises ConfigError for a budget or `max_rows` below 1.
    """
    if budget < 1:
        raise ConfigError(f"token budget: {budget}; give 1 or more")
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"micro-batch size: {max_rows} rows; give 1 or more")
    most = len(rows) if max_rows is None else max_rows
    units = [
        unit
        for family in (families(rows) if share else [[i] for i in range(len(rows))])
        for unit in _units(rows, family, budget, most)
    ]
    units.sort(key=lambda unit: (-unit[0], unit[1]))
    fitting = [unit for unit in units if unit[0] <= budget]
    alone = [unit[1] for unit in units if unit[0] > budget]
    half = sum(2 * tokens > budget for tokens, _ in fitting)
    count = max(-(-sum(tokens for tokens, _ in fitting) // budget), half)
    count += -(count + len(alone)) % ranks
    while (found := _spread(fitting, count, budget, most)) is None:
        count += ranks
    return alone + found


def turns_of(
    parts: Sequence[list[int]],  # micro-batches, as numbers of rows
    lengths: Sequence[int],  # tokens of each row
    mesh: Mesh,
) -> list[tuple[list[int], bool]]:
    """The micro-batches of this rank, and whether each counts; all of them where it is alone.

    The longest first, each to the rank with the least to do, equally many for all. Under FSDP a pass is one
    of all ranks, so a rank with nothing left repeats the shortest micro-batch, which then does not count.
    """
    if mesh.world_size == 1 or not parts:
        return [(part, True) for part in parts]
    costs = [sum(lengths[i] for i in part) for part in parts]
    shares = shared_out(costs, mesh.world_size)
    own, most = shares[mesh.rank], max(len(some) for some in shares)
    shortest = min(range(len(parts)), key=lambda i: costs[i])
    return [(parts[i], True) for i in own] + [(parts[shortest], False)] * (most - len(own))


def shared_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of micro-batches by rank: dearest first, each to the rank with least, about equally many."""
    most = -(-len(costs) // ranks)
    shares = [list[int]() for _ in range(ranks)]
    open_ones = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(open_ones)
        shares[rank].append(number)
        if len(shares[rank]) < most:
            heapq.heappush(open_ones, (load + costs[number], rank))
    return shares


def _units(
    rows: Sequence[TokenRow], family: Sequence[int], budget: int, max_rows: int
) -> list[tuple[int, list[int]]]:
    """A family cut where its tokens with the prompt counted once would not fit: tokens and rows of each."""
    found: list[tuple[int, list[int]]] = []
    for i in sorted(family, key=lambda i: (-len(rows[i].response_ids), i)):
        more = len(rows[i].response_ids)
        if found and found[-1][0] + more <= budget and len(found[-1][1]) < max_rows:
            found[-1] = found[-1][0] + more, [*found[-1][1], i]
        else:
            found.append((len(rows[i].prompt_ids) + more, [i]))
    return found


def _spread(
    units: Sequence[tuple[int, list[int]]], count: int, budget: int, max_rows: int
) -> list[list[int]] | None:
    """Units, longest first, each to the group of fewest tokens; None where one does not fit there."""
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for tokens, unit in units:
        aside = []
        while heap and len(groups[heap[0][1]]) + len(unit) > max_rows:
            aside.append(heapq.heappop(heap))
        if not heap or heap[0][0] + tokens > budget:
            return None
        used, number = heapq.heappop(heap)
        groups[number] += unit
        for entry in (*aside, (used + tokens, number)):
            heapq.heappush(heap, entry)
    return [group for group in groups if group]


def over_budget(lengths: Sequence[int], budget: int) -> list[int]:
    """The rows that are longer than the budget: each is a micro-batch of its own and may need more memory."""
    return [row for row, length in enumerate(lengths) if length > budget]


def over_budget_note(names: Sequence[str], lengths: Sequence[int], budget: int, key: str) -> list[str]:
    """What to say of rows above the budget, which the recipe's `key` gives; nothing where there are none."""
    long = over_budget(lengths, budget)
    if not long:
        return []
    longest = max(long, key=lambda row: lengths[row])
    return [
        f"{len(long)} of {len(lengths)} rows are longer than {key} {budget}, the longest {names[longest]} "
        f"with {lengths[longest]} tokens: each is a micro-batch of its own and needs more memory"
    ]
