"""Who sampled a token: against hand numbers for p = .5, .3, .2."""

import pytest
import torch

from rein.functional.calibration import (
    KINDS,
    above,
    chance_beyond,
    kind_of,
    nucleus_mass,
    other_kinds,
    surprise,
)

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


@pytest.mark.parametrize(("top_p", "mass"), [(1.0, 1.0), (0.81, 1.0), (0.79, 0.8), (0.5, 0.5), (0.1, 0.5)])
def test_a_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, mass: float) -> None:
    assert nucleus_mass(LOGITS[:1], ONE[:1], top_p).item() == pytest.approx(mass, abs=1e-6)


def test_a_flat_vocabulary_is_sorted_whole() -> None:
    flat = torch.zeros(2, 5000)
    assert nucleus_mass(flat, torch.ones(2), 0.5).tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_other_kinds_are_at_temperature_1_and_within_the_nucleus() -> None:
    squares = P**2 / (P**2).sum()  # at temperature 1/2: .658, .237, .105
    raw, cut = other_kinds(LOGITS[:2], IDS[:2], 0.5 * ONE[:2], 0.8)
    assert raw.tolist() == pytest.approx(P[:2].log().tolist(), abs=1e-6)
    assert cut.tolist() == pytest.approx((squares[:2] / squares[:2].sum()).log().tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("apart", "kind"),
    [
        ((1e-4, 1e-5, 1e-5), "processed"),  # all one, or rounding
        ((0.02, 0.3, 0.018), "processed"),  # bf16; a cut that takes hardly anything
        ((0.3, 0.02, 0.4), "raw"),
        ((0.3, 0.5, 0.01), "cut"),
        ((0.8, 0.7, 0.9), "unknown"),
    ],
)
def test_log_probs_are_of_the_kind_that_is_clearly_nearest(apart: tuple[float, ...], kind: str) -> None:
    assert kind_of(dict(zip(KINDS, apart, strict=True))) == kind
