"""One decoding step: what is chosen, how often, and with which log-prob; the numbers that choose."""

import math

import numpy as np
import pytest
import torch

from rein.engines.sampling import CHUNK, HEAD, choose, uniforms

LOGITS = torch.tensor([[math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]])


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(uniforms(seed, 0, 0, count))


def draws(count: int, *, temperature: float, top_p: float = 1.0, seed: int = 0) -> torch.Tensor:
    drawn = numbers(count, seed)
    ids, _ = choose(LOGITS.expand(count, -1), temperature=temperature, top_p=top_p, draws=drawn)
    return torch.bincount(ids, minlength=4) / count


def test_greedy_takes_the_likeliest_and_never_divides_by_zero() -> None:
    ids, log_probs = choose(LOGITS, temperature=0.0, top_p=1.0, draws=numbers(1))
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
        ids, log_probs = choose(LOGITS.expand(50, -1), temperature=0.7, top_p=top_p, draws=numbers(50))
        expected = (LOGITS[0] / 0.7).log_softmax(-1)[ids]
        torch.testing.assert_close(log_probs, expected)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    found = draws(20_000, temperature=1.0, top_p=0.7)  # .5 + .25
    assert found[2:].tolist() == [0, 0]
    assert found[0].item() == pytest.approx(2 / 3, abs=0.02)
    assert draws(2000, temperature=1.0, top_p=0.4)[0] == 1
    assert draws(2000, temperature=1.0, top_p=0.76)[3] == 0
    assert draws(2000, temperature=1.0, top_p=0.76)[2] > 0


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(spread: float) -> None:
    """Rows both within the likeliest HEAD tokens and beyond them; tokens in order of likelihood."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(40, 3 * HEAD, generator=generator, dtype=torch.float64)
    logits[::2] *= 5
    drawn = numbers(40)
    ids, _ = choose(logits, temperature=1.0, top_p=0.9, draws=drawn)
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    kept = ordered.where(ordered.cumsum(-1) - ordered < 0.9, 0).cumsum(-1)
    place = torch.searchsorted(kept, drawn[:, None] * kept[:, -1:], right=True)
    assert torch.equal(ids, order.gather(-1, place).squeeze(-1))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(20_000, -1)
    ids, log_probs = choose(logits, temperature=1.0, top_p=1.0, draws=numbers(20_000))
    assert set(ids.tolist()) == {1, 3}
    torch.testing.assert_close(log_probs, torch.full_like(log_probs, math.log(0.5)))


def test_numbers_are_of_the_answer_alone_and_no_global_generator_is_touched() -> None:
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    keys = [(seed, prompt, sample) for seed in (0, 1, 2**62) for prompt in (0, 1) for sample in (0, 1)]
    found = {tuple(uniforms(*key, 4).tolist()) for key in keys}
    assert len(found) == len(keys)
    assert uniforms(3, 4, 5, 9)[:4].tolist() == uniforms(3, 4, 5, 4).tolist()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]


@pytest.mark.parametrize("vocabulary", [2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_a_number_draws_the_token_where_the_summed_mass_passes_it(vocabulary: int) -> None:
    """Over the whole vocabulary at once, in float64: what two stages must find."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    drawn = torch.cat([numbers(2000), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)])
    ids, _ = choose(logits.expand(len(drawn), -1), temperature=1.0, top_p=1.0, draws=drawn)
    summed = logits[0].softmax(-1).cumsum(-1)
    expected = torch.searchsorted(summed, drawn * summed[-1], right=True).clamp(max=vocabulary - 1)
    assert torch.equal(ids, expected)


def test_narrow_logits_are_widened() -> None:
    _, log_probs = choose(LOGITS.to(torch.bfloat16), temperature=1.0, top_p=1.0, draws=numbers(1))
    assert log_probs.dtype == torch.float32
