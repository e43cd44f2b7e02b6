"""Log-probs of the head in one step are those of the logits, with their gradients, whatever the chunk."""

import pytest
import torch
from torch import Tensor

from rein.functional.log_probs import log_probs_of
from rein.models.head import head_log_probs

R, H, V = 7, 5, 11


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(R, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, V, (R,))


@pytest.mark.parametrize("chunk", [1, 3, R, 100])
def test_log_probs_and_gradients_are_those_of_the_logits(chunk: int) -> None:
    hidden, weight, ids = drawn()
    found = head_log_probs(hidden, weight, ids, chunk=chunk, precision="highest")
    own = log_probs_of(hidden @ weight.t(), ids)
    torch.testing.assert_close(found, own, atol=1e-12, rtol=0)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), (hidden, weight)),
        torch.autograd.grad(own.sin().sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_a_gradient_is_made_only_for_what_wants_one() -> None:
    hidden, weight, ids = drawn()
    frozen = weight.detach()
    head_log_probs(hidden, frozen, ids, chunk=3, precision="highest").sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None
    with torch.no_grad():
        assert not head_log_probs(hidden, weight, ids, chunk=3, precision="highest").requires_grad


def test_the_process_keeps_its_precision() -> None:
    hidden, weight, ids = drawn()
    before = torch.get_float32_matmul_precision()
    head_log_probs(hidden, weight, ids, chunk=3, precision="medium").sum().backward()
    assert torch.get_float32_matmul_precision() == before
