"""Useful operations against those that torch counts in the model's own passes."""

from dataclasses import replace

import pytest
import torch
from rows_made import random_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.models.flops import Flops

ROWS = random_rows(5)


def counted(path: str, *, backward: bool) -> tuple[float, float]:
    """What torch counts for the rows one by one, attention by half; of it, the head at prompt positions."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    config, total, beside = model.config, 0.0, 0.0
    passes = 3 if backward else 1
    for row in ROWS:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with FlopCounterMode(display=False) as counter:
            out = model(input_ids=ids).logits
            if backward:
                out.sum().backward()
        total += counter.get_total_flops()
        length = ids.shape[1]
        total -= passes * 2 * config.num_hidden_layers * length**2 * config.hidden_size
        beside += passes * 2 * config.hidden_size * config.vocab_size * len(row.prompt_ids)
    return total, beside


@pytest.mark.parametrize("backward", [False, True])
def test_useful_operations_are_those_that_torch_counts(backward: bool, tiny_lm: str) -> None:
    flops = Flops(load_actor(tiny_lm).model)
    found = flops.update(ROWS) if backward else flops.forward(ROWS)
    total, beside = counted(tiny_lm, backward=backward)
    assert found == pytest.approx(total - beside, rel=1e-6)


def test_frozen_weights_need_no_gradient_of_their_own(tiny_lm: str) -> None:
    whole, adapted = Flops(load_actor(tiny_lm).model), Flops(load_actor(tiny_lm, lora_rank=2).model)
    assert whole.update(ROWS) == 3 * whole.forward(ROWS)
    assert adapted.forward(ROWS) > whole.forward(ROWS)
    assert 2 * adapted.forward(ROWS) < adapted.update(ROWS) < 2.2 * adapted.forward(ROWS)


def test_a_critic_has_a_head_of_one_number(tiny_lm: str) -> None:
    actor, critic = Flops(load_actor(tiny_lm).model), Flops(load_critic(tiny_lm).model)
    assert critic.trunk == actor.trunk
    assert critic.head == critic.trained_head == actor.head // load_actor(tiny_lm).vocabulary


def test_the_precision_and_shared_prompts_change_nothing(tiny_lm: str) -> None:
    fast, rows = (
        Flops(load_actor(tiny_lm, precision="fast").model),
        [replace(row, prompt_ids=ROWS[0].prompt_ids) for row in ROWS],
    )
    assert fast.update(ROWS) == Flops(load_actor(tiny_lm).model).update(ROWS)
    assert fast.forward(rows[:1]) + fast.forward(rows[1:]) == pytest.approx(fast.forward(rows))
