"""Log-probs of the head in one step are those of the logits, with their gradients, whatever the chunk."""

import pytest
import torch
from torch import Tensor, nn

from rein.functional.log_probs import log_probs_of
from rein.models import head as head_module
from rein.models.forwards import sum_in_place
from rein.models.head import head_log_probs
from rein.models.products import Split, Wide, gemm

R, H, V = 7, 5, 11
amx = pytest.mark.skipif(gemm() is None, reason="needs a CPU with AMX")


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(R, H, dtype=dtype, requires_grad=True),
        nn.Linear(H, V, bias=False, dtype=dtype),
    )
    nn.init.normal_(head.weight)
    return hidden, head, torch.randint(0, V, (R,))


def taken(hidden: Tensor, head: nn.Linear, said: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and of the head's weight."""
    hidden.grad = head.weight.grad = None
    said.sin().sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    return hidden.grad, head.weight.grad


@pytest.mark.parametrize("chunk", [1, 3, R, 100])
def test_log_probs_and_gradients_are_those_of_the_logits(chunk: int) -> None:
    hidden, head, ids = drawn()
    found = head_log_probs(hidden, head, ids, entries=chunk * V, precision="highest")
    own = log_probs_of(hidden @ head.weight.t(), ids)
    torch.testing.assert_close(found, own, atol=1e-12, rtol=0)
    for one, other in zip(taken(hidden, head, found), taken(hidden, head, own), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("entries", [1, 1024, 4000, 2**24])
def test_log_probs_are_summed_over_parts_of_a_vocabulary(entries: int) -> None:
    """1,100 entries are tiles of 512, 512 and 76; some of them kept, all, or none."""
    hidden, _, _ = drawn()
    head = nn.Linear(H, 1100, bias=False, dtype=torch.float64)
    nn.init.normal_(head.weight, std=4)
    ids = torch.tensor([0, 511, 512, 700, 1023, 1024, 1099])
    found = head_log_probs(hidden, head, ids, entries=entries, precision="highest")
    own = log_probs_of(hidden @ head.weight.t(), ids)
    torch.testing.assert_close(found, own, atol=1e-12, rtol=0)
    for one, other in zip(taken(hidden, head, found), taken(hidden, head, own), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_no_position_has_no_log_prob() -> None:
    hidden, head, ids = drawn()
    assert head_log_probs(hidden[:0], head, ids[:0], entries=V, precision="highest").shape == (0,)


@amx
@pytest.mark.parametrize("chunk", [1, 3, R])
@pytest.mark.parametrize(("how", "near"), [("wide", 2e-2), ("split", 1e-4)])
def test_a_head_of_bfloat16_products_is_near(how: str, near: float, chunk: int) -> None:
    hidden, head, ids = drawn(torch.float32)
    own = log_probs_of(hidden @ head.weight.t(), ids)
    wanted = [own.detach(), *taken(hidden, head, own)]
    copy = head.weight.detach().bfloat16()
    sum_in_place(head, lambda own: Wide(copy, own.weight) if how == "wide" else Split(own.weight))
    found = head_log_probs(hidden, head, ids, entries=chunk * V, precision="highest")
    for one, other in zip([found.detach(), *taken(hidden, head, found)], wanted, strict=True):
        assert (one - other).norm() < near * other.norm()


@pytest.mark.parametrize("how", ["plain", pytest.param("wide", marks=amx)])
def test_a_sure_head_keeps_the_gradient_of_what_is_missing_to_1(how: str) -> None:
    """1 - p is 3.3537e-4: taken from p in bfloat16, which has steps of 4e-3 there, it would be 0."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    if how == "wide":
        sum_in_place(head, lambda own: Wide(own.weight.detach().bfloat16(), own.weight))
    hidden = torch.tensor([[8.0, 0.0]], requires_grad=True)
    head_log_probs(hidden, head, torch.tensor([0]), entries=2, precision="highest").sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0, 0].item(), 3.3535e-4, rtol=5e-3, atol=0)


def test_a_sure_token_keeps_what_is_missing_to_1_where_logits_are_large() -> None:
    """With logits 30 and 16, log p is -8.315e-7, below what float32 can hold beside 30."""
    head = nn.Linear(2, 2, bias=False)
    nn.init.eye_(head.weight)
    hidden = torch.tensor([[30.0, 16.0]], requires_grad=True)
    found = head_log_probs(hidden, head, torch.tensor([0]), entries=2, precision="highest")
    found.sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(found.item(), -8.315e-7, rtol=0.01, atol=0)
    torch.testing.assert_close(hidden.grad[0].tolist(), [8.315e-7, -8.315e-7], rtol=0.01, atol=0)


def test_what_needs_no_gradient_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    apply = head_module._LogProbs.apply
    monkeypatch.setattr(
        head_module._LogProbs, "apply", lambda *given: (kept.append(given[5]), apply(*given))[1]
    )
    hidden, head, ids = drawn()
    head_log_probs(hidden, head, ids, entries=100 * V, precision="highest")
    with torch.no_grad():
        head_log_probs(hidden, head, ids, entries=100 * V, precision="highest")
    assert kept == [400 * V, 0]


def test_a_gradient_is_made_only_for_what_wants_one() -> None:
    hidden, head, ids = drawn()
    head.requires_grad_(False)
    head_log_probs(hidden, head, ids, entries=3 * V, precision="highest").sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None
    head.requires_grad_(True)
    with torch.no_grad():
        assert not head_log_probs(hidden, head, ids, entries=3 * V, precision="highest").requires_grad


def test_the_process_keeps_its_precision() -> None:
    hidden, head, ids = drawn()
    before = torch.get_float32_matmul_precision()
    head_log_probs(hidden, head, ids, entries=3 * V, precision="medium").sum().backward()
    assert torch.get_float32_matmul_precision() == before
