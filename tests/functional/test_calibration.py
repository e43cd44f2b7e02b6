"""Who sampled a token: against hand numbers for p = .5, .3, .2."""

import pytest
import torch

from rein.functional.calibration import above, chance_beyond, surprise

P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
ONE = torch.ones(3, dtype=torch.float64)
LOGITS = P.log().expand(3, 3)
IDS = torch.tensor([0, 1, 2])


def test_above_is_what_lies_over_the_token() -> None:
    assert above(LOGITS, IDS, ONE).tolist() == pytest.approx([0.0, 0.5, 0.8], abs=1e-6)


def test_equal_tokens_do_not_lie_over_each_other() -> None:
    assert above(torch.zeros(2, 4), torch.tensor([0, 3]), torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize(("cut", "chance"), [(0.4, 0.5), (0.6, 0.2), (0.9, 0.0)])
def test_the_chance_beyond_a_cut_is_of_the_tokens_a_nucleus_leaves_out(cut: float, chance: float) -> None:
    found = chance_beyond(LOGITS[:1], ONE[:1], torch.tensor([cut, 0.95]))
    assert found.flatten().tolist() == pytest.approx([chance, 0], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_policy_does_not_surprise_itself(temperature: float) -> None:
    found = surprise(LOGITS, IDS, temperature * ONE)
    own = torch.softmax(LOGITS[0] / temperature, -1)
    assert (own * found).sum().item() == pytest.approx(0, abs=1e-12)
    colder = torch.softmax(LOGITS[0] / (temperature / 2), -1)
    assert (colder * found).sum().item() < 0
