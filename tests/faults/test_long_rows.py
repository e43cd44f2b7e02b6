"""B35: one row above the token budget is trained alone with a warning: never dropped, never endless."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_made import row

from rein import cli
from rein.data import addition
from rein.data.batches import micro_batches
from rein.experience import in_micro_batches
from rein.models.actor import load_actor
from rein.models.reward_model import load_reward_model
from rein.stages.reward_model import reward_backward
from rein.types import PreferencePair, Trajectory


def test_a_row_above_the_budget_is_alone_and_one_as_long_as_it_fits() -> None:
    assert micro_batches([3, 21, 4], 10) == [[1], [2, 0]]
    assert micro_batches([10, 10, 1], 10) == [[0], [1], [2]]


def trajectories() -> list[Trajectory]:
    draw = np.random.default_rng(0)
    made = []
    for i, length in enumerate((2, 20, 3, 1, 9)):
        ids = draw.integers(3, 18, size=length)
        made.append(Trajectory(f"row {i}", "1", np.array([4]), ids, np.ones(length, dtype=np.bool_)))
    return made


def test_the_answers_come_back_in_the_rows_order_whatever_the_budget(tiny_lm: str) -> None:
    actor, rows = load_actor(tiny_lm), trajectories()
    found = {
        budget: in_micro_batches(rows, budget, lambda part, temp: actor.log_probs(part, temp)[0])
        for budget in (1, 10, 1000)
    }
    for budget in (1, 10):
        assert torch.allclose(found[budget], found[1000], atol=1e-5)
    for i, one in enumerate(rows):
        assert bool((found[10][i, : len(one.response_ids)] < 0).all())
        assert bool((found[10][i, len(one.response_ids) :] == 0).all())


def test_chosen_and_rejected_stay_together_whatever_the_budget(tiny_lm: str) -> None:
    pairs = []
    for i, (chosen, rejected) in enumerate((([3], [4] * 30), ([5, 6], [7]), ([8] * 9, [9] * 9))):
        better, worse = row([3, 4], chosen), row([3, 4], rejected)
        pairs.append(
            PreferencePair(f"row {i}", "12", better.prompt_ids, better.response_ids, worse.response_ids)
        )
    gradients = []
    for budget in (1, 24, 1000):
        model = load_reward_model(tiny_lm)
        torch.nn.init.normal_(model.model.score.weight, generator=torch.Generator().manual_seed(0))
        metrics = reward_backward(model, pairs, budget)
        gradients.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
        assert metrics["train/loss"] > 0
    for gradient in gradients[:2]:
        assert torch.allclose(gradient, gradients[2], atol=1e-5)


def test_every_row_trains_and_the_long_one_is_named(
    tiny_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    addition.write(tmp_path, 0, demonstrations=20, prompts=1, dev=1, test=1, pairs=1)
    words = f"out={tmp_path}/run model.path={tiny_lm} sft.files={tmp_path}/demonstrations.parquet threads=1"
    assert cli.main(["sft", *words.split(), "sft.batch_size=10", "sft.ppo_max_token_len_per_gpu=36"]) == 0
    said = capsys.readouterr().out
    assert "20 in, 0 rejected, 20 trained" in said
    assert re.search(
        r"warning: \d+ of 20 rows are longer than sft.ppo_max_token_len_per_gpu 36, the longest "
        r"demonstrations.parquet row \d+ with \d+ tokens: each is a micro-batch of its own",
        said,
    )
