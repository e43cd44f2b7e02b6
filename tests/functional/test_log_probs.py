"""Log-probs, entropy and exact KL of small distributions worked out by hand."""

import math

import pytest
import torch

from rein.functional.log_probs import entropy_of, exact_kl, log_probs_of

LN3, INF = math.log(3), math.inf


def test_log_probs_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, LN3], [0.0, LN3]])
    found = log_probs_of(logits, torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([math.log(0.25), math.log(0.75)])


def test_each_row_has_its_own_temperature() -> None:
    logits = torch.tensor([[0.0, LN3], [0.0, LN3]])
    halved = log_probs_of(logits, torch.tensor([1, 1]), torch.tensor([0.5, 1.0]))
    assert halved.tolist() == pytest.approx([math.log(0.9), math.log(0.75)])
    spread = entropy_of(logits, torch.tensor([0.5, 1.0]))
    expected = [-0.9 * math.log(0.9) - 0.1 * math.log(0.1), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)]
    assert spread.tolist() == pytest.approx(expected)


def test_log_probs_stay_exact_for_huge_logits() -> None:
    found = log_probs_of(torch.tensor([[1e4, 1e4 - 2, -1e4]]), torch.tensor([1]))
    assert found.item() == pytest.approx(-2 - math.log1p(math.exp(-2)), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened_before_the_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    ids = torch.tensor([0, 7, 100, 299])
    assert log_probs_of(logits, ids).dtype == torch.float32
    torch.testing.assert_close(log_probs_of(logits, ids), log_probs_of(logits.float(), ids), rtol=0, atol=0)
    assert entropy_of(logits).dtype == torch.float32


def test_entropy_of_a_sure_choice_is_zero_and_of_a_coin_ln_2() -> None:
    assert entropy_of(torch.tensor([[0.0, -INF], [0.0, 0.0]])).tolist() == pytest.approx([0, math.log(2)])


def test_a_logit_of_minus_infinity_spoils_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.5, -INF]], requires_grad=True)
    (entropy_of(logits) + log_probs_of(logits, torch.tensor([1]))).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    two = torch.tensor([[0.0, 0.5]], requires_grad=True)
    (entropy_of(two) + log_probs_of(two, torch.tensor([1]))).sum().backward()
    assert two.grad is not None
    torch.testing.assert_close(logits.grad[:, :2], two.grad)


def test_gradients_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    ids = torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda z: log_probs_of(z, ids, temperature), logits)
    assert torch.autograd.gradcheck(lambda z: entropy_of(z, temperature), logits)


def test_exact_kl_by_hand_is_zero_at_itself_and_never_negative() -> None:
    even, skewed = torch.zeros(1, 2), torch.tensor([[0.0, LN3]])
    assert exact_kl(even, skewed).item() == pytest.approx(0.5 * math.log(4 / 3))
    assert exact_kl(skewed, even).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert exact_kl(skewed, skewed).item() == 0
    half = torch.tensor([0.5])
    expected = 0.1 * math.log(0.2) + 0.9 * math.log(1.8)
    assert exact_kl(skewed, even, half).item() == pytest.approx(expected)
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2))
    assert (exact_kl(logits, logits + 1e-6 * logits) >= 0).all()


def test_exact_kl_skips_what_the_actor_never_does() -> None:
    never = torch.tensor([[0.0, -INF]])
    assert exact_kl(never, torch.zeros(1, 2)).item() == pytest.approx(math.log(2))
