"""The pair loss is the mean over pairs, whatever the cut; accuracy counts ties apart."""

import numpy as np
import pytest
import torch
from rows_made import random_rows, row
from training_made import gradients

from rein.functional.preferences import bradley_terry_loss
from rein.models.reward_model import RewardModel, load_reward_model
from rein.stages.reward_model import measure, reward_backward
from rein.types import PreferencePair


def pair(
    i: int, prompt: list[int], chosen: list[int], rejected: list[int], margin: float = 0.0
) -> PreferencePair:
    ids = [np.array(part, dtype=np.int64) for part in (prompt, chosen, rejected)]
    return PreferencePair(f"pair {i}", "", *ids, margin=margin)


DRAWN = random_rows(12, seed=3)
PAIRS = [
    pair(
        i,
        DRAWN[2 * i].prompt_ids.tolist(),
        DRAWN[2 * i].response_ids.tolist(),
        DRAWN[2 * i + 1].response_ids.tolist(),
        margin=0.1 * i,
    )
    for i in range(6)
]


@pytest.fixture
def model(tiny_lm: str) -> RewardModel:
    made = load_reward_model(tiny_lm, dtype="float64")
    with torch.no_grad():
        made.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("budget", [1, 50, 10_000])
def test_the_loss_is_the_mean_over_pairs_whatever_the_cut(budget: int, model: RewardModel) -> None:
    metrics = reward_backward(model, PAIRS, budget)
    found = gradients(model.model)
    chosen, rejected = (
        torch.cat([model.scores([row(p.prompt_ids, ids(p))]) for p in PAIRS])  # type: ignore[arg-type]
        for ids in (lambda p: p.chosen_ids, lambda p: p.rejected_ids)
    )
    margin = torch.tensor([p.margin for p in PAIRS], dtype=torch.float64)
    loss = bradley_terry_loss(chosen, rejected, margin).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert metrics["train/accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
    for one, other in zip(found, gradients(model.model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    measured = measure(model, PAIRS, budget)
    assert measured["margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-6)


def test_equal_answers_are_ties_not_wins(model: RewardModel) -> None:
    same = pair(0, [3, 4], [5, 1], [5, 1])
    assert measure(model, [same], 100) == {"accuracy": 0.0, "ties": 1.0, "margin": 0.0}


def test_without_held_out_pairs_nothing_is_claimed(model: RewardModel) -> None:
    assert all(np.isnan(value) for value in measure(model, [], 100).values())
