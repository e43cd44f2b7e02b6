"""One decoding step: what is chosen, how often, and with which log-prob."""

import math

import pytest
import torch

from rein.engines.sampling import choose

LOGITS = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]])


def draws(count: int, *, temperature: float, top_p: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids, _ = choose(LOGITS.expand(count, -1), temperature=temperature, top_p=top_p, generator=generator)
    return torch.bincount(ids, minlength=4) / count


def test_greedy_takes_the_likeliest_and_never_divides_by_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, log_probs = choose(LOGITS, temperature=0.0, top_p=1.0, generator=generator)
    assert ids.item() == 0
    assert log_probs.item() == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature: float) -> None:
    """Frequencies of 40,000 draws are within 5 standard errors."""
    expected = (LOGITS[0] / temperature).softmax(-1)
    error = (expected * (1 - expected) / 40_000).sqrt()
    assert ((draws(40_000, temperature=temperature) - expected).abs() < 5 * error).all()


def test_the_log_prob_is_of_the_whole_softmax_at_the_temperature_whatever_top_p() -> None:
    for top_p in (1.0, 0.6):
        generator = torch.Generator().manual_seed(0)
        ids, log_probs = choose(LOGITS.expand(50, -1), temperature=0.7, top_p=top_p, generator=generator)
        expected = (LOGITS[0] / 0.7).log_softmax(-1)[ids]
        torch.testing.assert_close(log_probs, expected)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    found = draws(20_000, temperature=1.0, top_p=0.7)  # .5 + .25
    assert found[2:].tolist() == [0, 0]
    assert found[0].item() == pytest.approx(2 / 3, abs=0.02)
    assert draws(2000, temperature=1.0, top_p=0.4)[0] == 1
    assert draws(2000, temperature=1.0, top_p=0.76)[3] == 0
    assert draws(2000, temperature=1.0, top_p=0.76)[2] > 0


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(20_000, -1)
    ids, log_probs = choose(logits, temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(1))
    assert set(ids.tolist()) == {1, 3}
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, math.log(0.5)))


def test_the_same_seed_draws_the_same_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (draws(500, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_narrow_logits_are_widened() -> None:
    _, log_probs = choose(
        LOGITS.to(torch.bfloat16), temperature=1.0, top_p=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert log_probs.dtype == torch.float32
