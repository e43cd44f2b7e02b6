"""The SFT loss is the mean over response tokens, whatever the cut."""

import numpy as np
import pytest
import torch
from rows_made import Row, own_log_probs, random_trajectories
from training_made import gradients

from rein.models.actor import load_actor
from rein.stages.sft import sft_backward
from rein.stages.supervised import TOKENS_KEY
from rein.types import Demonstration

ROWS = [
    Demonstration(row.where, row.prompt_ids, row.response_ids, row.response_mask)
    for row in random_trajectories(8, seed=6, holes=True)
]


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_the_loss_is_the_mean_nll_of_counted_response_tokens(budget: int, tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, dtype="float64")
    metrics = sft_backward(actor, ROWS, budget)
    found = gradients(actor.model)
    total = torch.zeros((), dtype=torch.float64)
    for row in ROWS:
        said = own_log_probs(actor.model, Row(row.prompt_ids, row.response_ids))
        total = total - said[torch.from_numpy(row.response_mask)].sum()
    loss = total / sum(row.response_mask.sum() for row in ROWS)
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
    for one, other in zip(found, gradients(actor.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_row_without_a_counted_token_adds_nothing(tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, dtype="float64")
    one = ROWS[0]
    nothing = Demonstration("none", one.prompt_ids, one.response_ids, np.zeros_like(one.response_mask))
    said = sft_backward(actor, ROWS, 1)
    without = gradients(actor.model)
    also = sft_backward(actor, [*ROWS, nothing], 1)
    assert also.pop(TOKENS_KEY) > said.pop(TOKENS_KEY)  # it is read all the same
    assert also == said
    assert all(torch.equal(a, b) for a, b in zip(without, gradients(actor.model), strict=True))
