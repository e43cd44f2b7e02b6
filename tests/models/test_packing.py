"""A pack holds every token once, where its row says, and blocks of little padding."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_made import random_rows, row

from rein.models.packing import GROUP_WASTE, pack

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


def test_a_pack_by_hand() -> None:
    packed = pack([row([5, 6], [7]), row([8], [9])])
    assert packed.input_ids.tolist() == [[8, 9, 5, 6, 7]]  # the shorter row first
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert packed.states.tolist() == [0, 3]  # the state before each response token
    assert packed.targets.tolist() == [9, 7]
    assert packed.last.tolist() == [4, 1]
    assert packed.shape == (2, 1)
    assert packed.spread(torch.tensor([0.5, 0.25])).tolist() == [[0.25], [0.5]]


@given(LENGTHS)
@settings(deadline=None, max_examples=60)
def test_every_row_lies_in_the_pack_whole_and_comes_back_in_its_place(lengths: list[tuple[int, int]]) -> None:
    draw = np.random.default_rng(0)
    rows = [row(draw.integers(0, 99, p).tolist(), draw.integers(0, 99, t).tolist()) for p, t in lengths]
    packed = pack(rows)
    back = packed.spread(packed.targets + 1)
    for i, some in enumerate(rows):
        length = len(some.prompt_ids) + len(some.response_ids)
        end = int(packed.last[i]) + 1
        whole = [*some.prompt_ids.tolist(), *some.response_ids.tolist()]
        assert packed.input_ids[0, end - length : end].tolist() == whole
        assert packed.position_ids[0, end - length : end].tolist() == list(range(length))
        assert back[i, : len(some.response_ids)].tolist() == [t + 1 for t in some.response_ids.tolist()]
        assert not back[i, len(some.response_ids) :].any()
    assert packed.input_ids.shape[1] == sum(p + t for p, t in lengths)
    assert (packed.input_ids[0, packed.states + 1] == packed.targets).all()


@given(LENGTHS)
@settings(deadline=None, max_examples=60)
def test_blocks_cover_the_pack_and_waste_little(lengths: list[tuple[int, int]]) -> None:
    rows = [row([1] * p, [1] * t) for p, t in lengths]
    packed = pack(rows)
    position = 0
    for group in packed.layout.groups:
        assert group.start == position
        position = group.stop
        tokens = group.stop - group.start
        assert tokens >= (1 - GROUP_WASTE) * group.rows * group.length - 1e-6
        if group.scatter is None:
            assert tokens == group.rows * group.length
        else:
            assert len(set(group.scatter.tolist())) == tokens
            assert int(group.scatter.max()) == group.rows * group.length - 1
    assert position == sum(p + t for p, t in lengths)
    assert sum(group.rows for group in packed.layout.groups) == len(rows)


def test_packing_is_the_same_for_the_same_rows() -> None:
    one, other = pack(random_rows(9)), pack(random_rows(9))
    assert torch.equal(one.input_ids, other.input_ids)
