"""Products of two bfloat16 halves are float32's, and each way of making products makes the same."""

import pytest
import torch
from torch import Tensor, nn

from rein.models.forwards import sum_in_place
from rein.models.precision import FLOAT32_ERROR
from rein.models.products import Half, Plain, Product, Split, Wide, add_product, gemm, pays, split

amx = pytest.mark.skipif(gemm() is None, reason="needs a CPU with AMX")
N, M, K = 50, 30, 40


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true).norm() / true.norm()).item()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_two_halves_hold_17_bits(scale: float) -> None:
    x = scale * drawn(300, 400)
    high, low = split(x)
    assert high.dtype == low.dtype == torch.bfloat16
    gap = (high.double() + low.double() - x.double()).abs()
    assert (gap <= 2**-17 * x.double().abs()).all()


def test_a_split_of_any_layout_is_that_of_its_values() -> None:
    x = drawn(6, 9).t()
    for part, own in zip(split(x), split(x.contiguous()), strict=True):
        assert torch.equal(part, own)


def test_what_is_not_finite_does_not_turn_finite() -> None:
    high, low = split(torch.tensor([[float("nan"), float("inf"), -float("inf")]]))
    assert not torch.isfinite(high.float() + low.float()).any()


@amx
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_a_product_is_the_matrices_own_and_adds(transpose_a: bool, transpose_b: bool) -> None:
    a, b, out = drawn(N, K).bfloat16(), drawn(K, M, seed=1).bfloat16(), drawn(N, M, seed=2)
    true = a.double() @ b.double()
    given = a.t().contiguous() if transpose_a else a, b.t().contiguous() if transpose_b else b
    found = out.clone()
    add_product(found, *given, transpose_a=transpose_a, transpose_b=transpose_b)
    assert error(found, true + out.double()) < 1e-6
    add_product(found, *given, transpose_a=transpose_a, transpose_b=transpose_b, add=False)
    assert error(found, true) < 1e-6


@amx
def test_a_product_reads_and_writes_parts_of_larger_matrices() -> None:
    a, b, out = drawn(N, 90).bfloat16(), drawn(90, M, seed=1).bfloat16(), torch.zeros(N, 2 * M)
    part = a[:, 20:60]
    add_product(out[:, M:], part, b[20:60])
    assert error(out[:, M:], part.double() @ b[20:60].double()) < 1e-6
    assert not out[:, :M].any()


def products(weight: nn.Parameter) -> dict[str, tuple[Product, float]]:
    copy = weight.detach().bfloat16()
    found: dict[str, tuple[Product, float]] = {
        "plain": (Plain(weight), 1e-6),
        "half": (Half(copy, weight), 2e-2),
    }
    if gemm() is not None:
        found |= {"wide": (Wide(copy, weight), 1e-2), "split": (Split(weight), FLOAT32_ERROR)}
    return found


@pytest.mark.parametrize(
    "how", ["plain", "half", pytest.param("wide", marks=amx), pytest.param("split", marks=amx)]
)
@pytest.mark.parametrize("rows", [1, N])
def test_each_way_makes_the_same_products(how: str, rows: int) -> None:
    weight, x, grad = nn.Parameter(drawn(M, K)), drawn(rows, K, seed=1), drawn(rows, M, seed=2)
    product, near = products(weight)[how]
    given = [t.bfloat16() if how == "half" else t for t in (x, grad)]
    one, other = (product.factor(t) for t in given)
    wide = weight.detach().double()
    with torch.no_grad():
        assert error(product.times(given[0]), x.double() @ wide.t()) < near
        assert error(product.back(other), grad.double() @ wide) < near
        twice = product.back(other, product.back(other))
        assert error(twice, 2 * grad.double() @ wide) < near
        for times in (1, 2):
            product.add_gradient(other, one)
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
            assert error(weight.grad, times * grad.double().t() @ x.double()) < near


def test_small_and_float64_weights_are_left_to_torch() -> None:
    assert not pays(torch.zeros(8, 8))
    assert not pays(torch.zeros(1024, 1024, dtype=torch.float64))
    assert pays(torch.zeros(1024, 1024)) == (gemm() is not None)


@amx
def test_a_layer_in_halves_is_float32_s_forward_and_backward() -> None:
    layer = nn.Linear(600, 500)
    x = drawn(100, 600).requires_grad_()
    double = nn.Linear(600, 500).double()
    double.load_state_dict(layer.state_dict())
    wide = x.detach().double().requires_grad_()
    sum_in_place(layer, lambda own: Split(own.weight))
    found, true = layer(x), double(wide)
    found.square().sum().backward()
    true.square().sum().backward()
    assert error(found, true) < FLOAT32_ERROR
    pairs = [(x, wide), *zip(layer.parameters(), double.parameters(), strict=True)]
    for one, other in pairs:
        assert one.grad is not None
        assert other.grad is not None
        assert error(one.grad, other.grad) < FLOAT32_ERROR
