"""The start policy stays where it was, costs nothing with adapters, and a KL to it is exact."""

from typing import Any

import pytest
import torch
from rows_made import VOCABULARY, Row, random_rows
from torch import Tensor
from training_made import gradients, moved

from rein.models.actor import Actor, load_actor
from rein.models.reference import Reference

ROWS = random_rows(6, seed=5)
TEMPERATURE = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7])
KINDS: dict[str, dict[str, Any]] = {
    "whole model": {},
    "adapters": {"lora_rank": 4},
    "adapters on the head too": {"lora_rank": 4, "target_modules": ["q_proj", "lm_head"]},
}
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's, of the head
kinds = pytest.mark.parametrize("options", list(KINDS.values()), ids=list(KINDS))


def made(path: str, **options: Any) -> tuple[Actor, Reference]:
    actor = load_actor(path, dtype="float64", **options)
    reference = Reference(actor)
    moved(actor.model, 3, size=0.3 if options.get("lora_rank") else 0.1)
    return actor, reference


def plain(model: torch.nn.Module, row: Row, temperature: float) -> Tensor:
    """log softmax at each response token, by the model's own forward without packing."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return (logits[0, len(row.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)


def by_rows(actor: Actor, start: Actor) -> list[Tensor]:
    found = []
    for row, temperature in zip(ROWS, TEMPERATURE.tolist(), strict=True):
        log_p = plain(actor.model, row, temperature)
        with torch.no_grad():
            log_q = plain(start.model, row, temperature)
        found.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return found


@kinds
def test_the_exact_kl_and_its_gradient_are_those_of_plain_forward_passes(
    options: dict[str, Any], tiny_lm: str
) -> None:
    (actor, reference), start = made(tiny_lm, **options), load_actor(tiny_lm, dtype="float64")
    log_probs, entropy, kl = actor.log_probs_and_kl(ROWS, TEMPERATURE, reference, entropy=True)
    plainly, entropies = actor.log_probs(ROWS, TEMPERATURE, entropy=True)
    assert torch.equal(log_probs, plainly)
    assert entropy is not None
    assert entropies is not None
    assert torch.equal(entropy, entropies)
    expected = by_rows(actor, start)
    for i, some in enumerate(expected):
        torch.testing.assert_close(kl[i, : len(some)], some, atol=1e-9, rtol=1e-9)
        assert not kl[i, len(some) :].any()
    assert kl.max() > 0.01
    kl.sum().backward()  # type: ignore[no-untyped-call]
    found = gradients(actor.model)
    torch.cat(expected).sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(found, gradients(actor.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)  # the model's norms are float32
    assert any(one.abs().max() > 1e-3 for one in found)


@kinds
def test_at_the_start_the_kl_is_exactly_0(options: dict[str, Any], tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, **options)
    _, _, kl = actor.log_probs_and_kl(ROWS, TEMPERATURE, Reference(actor))
    assert not kl.any()


def test_only_a_copy_costs_memory(tiny_lm: str) -> None:
    actor, reference = made(tiny_lm)
    size = sum(p.numel() * 8 for p in actor.model.parameters())
    assert size <= reference.bytes < 1.01 * size  # and a few buffers
    adapted, frugal = made(tiny_lm, lora_rank=4)
    assert frugal.bytes == 0
    assert frugal.actor is adapted


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_chunks_and_gradient_checkpointing_change_nothing(lora_rank: int, tiny_lm: str) -> None:
    def everything(**options: Any) -> list[Tensor]:
        actor, reference = made(tiny_lm, lora_rank=lora_rank, **options)
        log_probs, _, kl = actor.log_probs_and_kl(ROWS, TEMPERATURE, reference)
        (log_probs.square() + kl).sum().backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is None for p in reference.actor.model.parameters() if not p.requires_grad)
        return [log_probs, kl, *gradients(actor.model)]

    whole = everything()
    for options in ({}, {"enable_gradient_checkpointing": True}):
        for one, other in zip(whole, everything(**options, logits_chunk=3 * VOCABULARY), strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_descending_the_exact_kl_brings_the_start_policy_back(tiny_lm: str) -> None:
    actor, reference = made(tiny_lm)
    optimizer, said = torch.optim.SGD(actor.model.parameters(), lr=0.5), []
    for _ in range(5):
        _, _, kl = actor.log_probs_and_kl(ROWS, TEMPERATURE, reference)
        said.append(kl.mean().item())
        kl.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert said[-1] < 0.7 * said[0]
