"""Places of the cache: filled again at once, closed when nothing waits, widened when answers grow."""

import numpy as np
import pytest
import torch
from rows_made import prompts

from rein.engines import kv_cache, slots
from rein.engines.board import Ask, Manner
from rein.engines.fused import Fused
from rein.engines.hf import HfEngine
from rein.models.actor import Actor
from rein.types import Completion


def asked(rooms: list[list[int]]) -> list[Ask]:
    """Prompts of 1, 2, 3 ... tokens with so much room for each of their samples."""
    return [
        Ask(i, sample, np.arange(i + 1) % 12 + 3, room)
        for i, some in enumerate(rooms)
        for sample, room in enumerate(some)
    ]


def decoded(
    actor: Actor, rooms: list[list[int]], places: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Completion], list[int]]:
    """All answers in order, and how many rows each step computed."""
    steps: list[int] = []
    step = Fused.step

    def counted(fused: Fused, ids: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
        steps.append(len(ids))
        return step(fused, ids, lengths)

    monkeypatch.setattr(Fused, "step", counted)
    manner = Manner(1.0, 1.0, 0, np.array([], dtype=np.int64), (), actor.tokenizer)
    answers: list[list[Completion | None]] = [[None] * len(some) for some in rooms]
    with torch.no_grad():
        slots.decode(actor.model, asked(rooms), places, manner, answers, lambda _: None)
    monkeypatch.setattr(Fused, "step", step)
    return [completion for some in answers for completion in some if completion is not None], steps


ROOMS = [[3, 40, 1], [9, 2, 2], [1, 1, 1], [30, 5, 7], [2, 4, 8]]


@pytest.mark.parametrize("places", [1, 2, 4, 7, 15, 99])
def test_places_are_never_idle_while_answers_wait_and_close_when_none_does(
    actor: Actor, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, steps = decoded(actor, ROOMS, places, monkeypatch)
    assert [len(completion.response_ids) for completion in answers] == [r for some in ROOMS for r in some]
    assert sum(steps) == sum(map(sum, ROOMS))
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == min(places, 15)


@pytest.mark.parametrize("places", [1, 2, 4, 7])
@pytest.mark.parametrize("block", [1, 3])
def test_neither_refilled_nor_moved_nor_blocked_rows_change_an_answer(
    actor: Actor, places: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = decoded(actor, ROOMS, 99, monkeypatch)
    monkeypatch.setattr(kv_cache, "ANSWERS", block)
    monkeypatch.setattr(kv_cache, "PROMPTS", block)
    found, _ = decoded(actor, ROOMS, places, monkeypatch)
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def test_an_answer_longer_than_the_cache_widens_it(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = decoded(actor, [[90, 5], [80, 70]], 99, monkeypatch)
    monkeypatch.setattr(kv_cache, "ANSWER_COLUMNS", 1)
    monkeypatch.setattr(kv_cache, "PROMPT_COLUMNS", 1)
    found, _ = decoded(actor, [[90, 5], [80, 70]], 3, monkeypatch)
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()


def test_prompts_beyond_what_one_forward_reads_are_read_in_several(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[3, 4, 5, 6, 7, 8][: 1 + i % 6] for i in range(12)]

    def answers() -> list[list[int]]:
        engine = HfEngine(actor.model, actor.tokenizer, [1])
        found = engine.generate(prompts(texts), n=2, temperature=1.0, top_p=1.0, max_new_tokens=9, seed=0)
        return [completion.response_ids.tolist() for some in found for completion in some]

    expected = answers()
    monkeypatch.setattr(slots, "READ_TOKENS", 7)
    assert answers() == expected
