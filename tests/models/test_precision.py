"""`fast` computes in bfloat16 and trains, keeps and saves float32; `exact` is float32 on any chip."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_made import random_rows
from torch import Tensor
from transformers import AutoModelForCausalLM

from rein.config.recipe import Optim
from rein.engines.hf import HfEngine
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.precision import (
    FLOAT32_ERROR,
    is_fast,
    medium_is_float32,
    own_weights,
    refresh_copies,
    release_copies,
)
from rein.models.reference import Reference
from rein.models.reward_model import load_reward_model
from rein.runtime.optimizer import Optimizer
from rein.types import Prompt

ROWS, ONES = random_rows(6), torch.ones(6)


@pytest.fixture
def fast(tiny_lm: str) -> Actor:
    return load_actor(tiny_lm, precision="fast")


def said(actor: Actor) -> Tensor:
    with torch.no_grad():
        return actor.log_probs(ROWS, ONES)[0]


def test_float32_products_of_this_process_are_float32_s(tiny_lm: str) -> None:
    load_actor(tiny_lm)
    wanted = "medium" if medium_is_float32() else "highest"
    assert torch.get_float32_matmul_precision() == wanted
    x, w = torch.randn(200, 600), torch.randn(600, 300)
    true = x.double() @ w.double()
    assert ((x @ w).double() - true).norm() < FLOAT32_ERROR * true.norm()


def test_fast_is_near_exact_and_not_equal(tiny_lm: str, fast: Actor) -> None:
    gap = (said(fast) - said(load_actor(tiny_lm))).abs()
    assert 0 < gap.max() < 0.05
    assert said(fast).dtype == torch.float32


def test_gradients_come_to_the_float32_weights_and_are_near_those_of_exact(tiny_lm: str, fast: Actor) -> None:
    exact = load_actor(tiny_lm)
    for actor in (fast, exact):
        for _ in range(2):  # micro-batches add up
            actor.log_probs(ROWS, ONES)[0].sum().backward()  # type: ignore[no-untyped-call]
    own = dict(exact.model.named_parameters())
    for name, parameter in fast.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        grad = own[name].grad
        assert (parameter.grad - grad).norm() < 0.1 * grad.norm(), name


def test_a_small_step_is_not_lost_and_is_seen_by_the_next_pass(fast: Actor) -> None:
    before, start = said(fast), copy.deepcopy(fast.model.state_dict())
    adam = torch.optim.AdamW(fast.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    for _ in range(3):
        fast.log_probs(ROWS, ONES)[0].sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
    moved = max((p - start[n]).abs().max().item() for n, p in fast.model.state_dict().items())
    assert 2e-6 < moved < 4e-6  # bfloat16 would have rounded it away
    adam.param_groups[0]["lr"] = 0.1
    fast.log_probs(ROWS, ONES)[0].sum().backward()  # type: ignore[no-untyped-call]
    adam.step()
    assert (said(fast) - before).abs().max() > 0.01


def test_every_step_is_seen_by_the_next_pass(fast: Actor) -> None:
    optimizer = Optimizer(fast.model, Optim(lr=0.01), grad_clip=1.0, total_steps=100)
    for _ in range(4):
        fast.log_probs(ROWS, ONES)[0].sum().backward()  # type: ignore[no-untyped-call]
        optimizer.apply(optimizer.grad_norm())
        said(fast)
        for parameter, copy_read in fast.model.half_copies.copies.values():
            assert torch.equal(copy_read, parameter.to(torch.bfloat16))


def test_copies_that_were_given_back_are_made_again(fast: Actor) -> None:
    before = said(fast)
    release_copies(fast.model)
    copies = fast.model.half_copies.copies.values()
    assert not any(copy_read.untyped_storage().size() for _, copy_read in copies)
    assert torch.equal(said(fast), before)
    frozen = load_actor(fast.path, precision="fast", lora_rank=2)
    release_copies(frozen.model)
    held = {p.requires_grad: c.untyped_storage().size() for p, c in frozen.model.half_copies.copies.values()}
    assert held[False]
    assert not held[True]


def test_an_engine_reads_the_weights_of_now(fast: Actor) -> None:
    """Answers made after a step and before any other pass are those of a model that was read in between."""
    prompt = Prompt("p", "", ROWS[0].prompt_ids)
    optimizer = Optimizer(fast.model, Optim(lr=0.1), grad_clip=1.0, total_steps=100)
    for released in (False, True):
        fast.log_probs(ROWS, ONES)[0].sum().backward()  # type: ignore[no-untyped-call]
        if released:
            release_copies(fast.model)
        optimizer.apply(optimizer.grad_norm())
        answers = []
        for _ in range(2):
            engine = HfEngine(fast.model, fast.tokenizer, [], before=lambda: refresh_copies(fast.model))
            (found,) = engine.generate([prompt], n=1, temperature=0.0, top_p=1.0, max_new_tokens=8, seed=0)
            answers.append(found[0].log_probs)
            said(fast)
        assert np.array_equal(*answers)


def test_training_in_fast_goes_where_it_goes_in_exact(tiny_lm: str) -> None:
    """Twelve steps of AdamW: the log-probs end alike, far from where they began."""
    ends = []
    for precision in ("exact", "fast"):
        actor = load_actor(tiny_lm, precision=precision)
        start = said(actor)
        optimizer = Optimizer(actor.model, Optim(lr=3e-3), grad_clip=1.0, total_steps=12)
        for _ in range(12):
            (-actor.log_probs(ROWS, ONES)[0].sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.apply(optimizer.grad_norm())
        ends.append((said(actor) - start).sum().item())
    exact, quick = ends
    assert exact > 5
    assert abs(quick - exact) < 0.05 * exact


def test_what_is_saved_is_the_float32_weights(fast: Actor, tmp_path: Path, tiny_lm: str) -> None:
    with torch.no_grad():
        for parameter in fast.model.parameters():
            parameter.add_(1e-6)
    fast.save(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for name, tensor in fast.model.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(saved[name], tensor)


def test_adapters_are_fused_from_float32_weights(tiny_lm: str, tmp_path: Path) -> None:
    fast = load_actor(tiny_lm, precision="fast", lora_rank=2)
    with torch.no_grad():
        for name, parameter in fast.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    with own_weights(fast.model):
        module = fast.model.model.layers[0].mlp.up_proj
        wanted = module.get_base_layer().weight + module.get_delta_weight("default")
    fast.save(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert torch.equal(saved["model.layers.0.mlp.up_proj.weight"], wanted)
    assert module.get_base_layer().weight.dtype == torch.bfloat16  # and computes with its copies again


def test_the_frozen_reference_of_a_fast_actor_is_fast_and_at_no_distance(fast: Actor) -> None:
    reference = Reference(fast)
    assert is_fast(reference.actor.model)
    log_probs, _, kl = fast.log_probs_and_kl(ROWS, ONES, reference)
    assert kl.detach().abs().max() < 1e-6
    log_probs.sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in reference.actor.model.parameters())
    with torch.no_grad():
        for parameter in fast.model.parameters():
            parameter.mul_(1.2)
        assert fast.log_probs_and_kl(ROWS, ONES, reference)[2].max() > 1e-4


def test_critic_and_judge_answer_in_float32(tiny_lm: str) -> None:
    critic = load_critic(tiny_lm, precision="fast", lora_rank=2, enable_gradient_checkpointing=True)
    judge = load_reward_model(tiny_lm, precision="fast")
    for model, answer in ((critic, critic.values), (judge, judge.scores)):
        torch.nn.init.normal_(model.model.score.weight)
        found = answer(ROWS)
        assert found.dtype == torch.float32
        found.sum().backward()  # type: ignore[no-untyped-call]
        trained = [p for p in model.model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
