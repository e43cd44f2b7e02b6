"""Rows keep their keys and values wherever they move, and attention in parts is attention over the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rein.engines import kv_cache
from rein.engines.kv_cache import ALONE, Cache
from rein.engines.kv_store import Store

LAYERS, HEADS, GROUPS, DIM = 2, 2, 3, 4
LIKE = torch.zeros(1, dtype=torch.float64)


def numbers(tokens: int, generator: torch.Generator) -> Tensor:
    """Keys or values, [K, T, D]."""
    return torch.randn(HEADS, tokens, DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_rows_keep_what_they_hold_through_leaves_moves_and_widths(size: int) -> None:
    draw, generator = np.random.default_rng(size), torch.Generator().manual_seed(size)
    store = Store(LAYERS, HEADS, DIM, LIKE, rows=size, columns=3)
    held: list[tuple[Tensor, Tensor]] = []  # of layer 1, by row
    for _ in range(400):
        if len(held) < 20 and draw.random() < 0.55:
            pair = numbers(length := int(draw.integers(0, 12)), generator), numbers(length, generator)
            store.put(1, store.append(length), *pair)
            held.append(pair)
        elif held:
            for source, target in store.close(int(draw.integers(len(held)))) or [(-1, -1)]:
                held[target] = held[source]
            held.pop()
            if held and draw.random() < 0.5:
                store.fit(int(draw.integers(3)))
        assert store.lengths.tolist() == [pair[0].shape[1] for pair in held]
        assert len(store.blocks) == -(-len(held) // size)
        for row, pair in enumerate(held):
            block, length = store.blocks[row // size], pair[0].shape[1]
            assert torch.equal(block.layers[1][:, row % size, :, :length], torch.stack(pair))
            assert block.layers[1].isfinite().all()


def test_where_the_oldest_leaves_blocks_stay_sorted_by_length() -> None:
    store = Store(1, HEADS, DIM, LIKE, rows=4, columns=8)
    for length in range(40, 0, -1):
        store.append(length)
    for _ in range(30):
        store.close(0)
        edges = [store.lengths[begin : begin + 4] for begin in range(0, store.count, 4)]
        assert all(one.min() >= other.max() for one, other in pairwise(edges))


def test_a_block_is_as_wide_as_its_longest_row_needs() -> None:
    store = Store(1, HEADS, DIM, LIKE, rows=2, columns=8)
    for length in (30, 9, 8, 1):
        store.append(length)
    store.fit(1)
    assert [block.columns for block in store.blocks] == [32, 16]
    store.close(0)
    store.fit(1)
    assert [block.columns for block in store.blocks] == [16, 8]
    assert [block.rows for block in store.blocks] == [2, 1]


def expected(query: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One place's attention, [K, G, D], over its parts laid end to end."""
    keys, values = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
    return (query @ keys.transpose(1, 2)).softmax(-1) @ values


@pytest.mark.parametrize("blocks", [(1, 1), (3, 2), (32, 16)])
def test_attention_in_parts_is_attention_over_prompt_and_answer(
    blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with and without a shared prompt begin and leave; a prompt nobody reads just now is kept."""
    monkeypatch.setattr(kv_cache, "ANSWERS", blocks[0])
    monkeypatch.setattr(kv_cache, "PROMPTS", blocks[1])
    draw, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    cache = Cache(LAYERS, 12, HEADS, DIM, LIKE)
    prompts: list[tuple[Tensor, Tensor]] = []  # by row
    held: list[list[tuple[Tensor, Tensor]]] = []  # by place: the prompt's, if any, and the answer's own
    for step in range(60):
        if len(prompts) < 4:
            pair = numbers(length := int(draw.integers(1, 40)), generator), numbers(length, generator)
            cache.prompts.put(1, cache.prompts.append(length), *pair)
            prompts.append(pair)
        while len(held) < 12 - step % 3:
            row = int(draw.integers(ALONE, len(prompts) - 1))
            length = int(draw.integers(0, 20)) if row == ALONE else 0
            pair = numbers(length, generator), numbers(length, generator)
            cache.own.put(1, cache.begin(row, length), *pair)
            held.append([pair] if row == ALONE else [prompts[row], pair])
        query = torch.randn(len(held), HEADS, GROUPS, DIM, generator=generator, dtype=torch.float64) * 3
        key, value = (
            torch.randn(len(held), HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        found = cache.attend(1, cache.frame(), query.flatten(0, 1), key, value).view_as(query)
        for place, parts in enumerate(held):
            own = [
                torch.cat([old, new[place].unsqueeze(1)], 1)
                for old, new in zip(parts[-1], (key, value), strict=True)
            ]
            parts[-1] = own[0], own[1]
            torch.testing.assert_close(found[place], expected(query[place], parts), atol=1e-12, rtol=0)
        for source, target in cache.close(int(draw.integers(len(held)))):
            held[target] = held[source]
        held.pop()
        unread = [row for row in range(len(prompts)) if row not in cache.prompt_of]
        if unread and step % 5 == 0:
            for source, target in cache.close_prompt(unread[0]):
                prompts[target] = prompts[source]
            prompts.pop()


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_one_part_may_outweigh_the_other_wholly(scale: float) -> None:
    """Scores hundreds apart: sums of their exponentials would be infinite or 0."""
    generator = torch.Generator().manual_seed(1)
    cache = Cache(LAYERS, 2, HEADS, DIM, LIKE)
    pair = numbers(5, generator) * scale, numbers(5, generator)
    cache.prompts.put(0, cache.prompts.append(5), *pair)
    for _ in range(2):
        cache.begin(0)
    query = torch.randn(2, HEADS, GROUPS, DIM, generator=generator, dtype=torch.float64) * scale
    key, value = (torch.randn(2, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    found = cache.attend(0, cache.frame(), query.flatten(0, 1), key, value).view_as(query)
    for place in range(2):
        own = key[place].unsqueeze(1), value[place].unsqueeze(1)
        torch.testing.assert_close(found[place], expected(query[place], [pair, own]), atol=1e-12, rtol=0)
