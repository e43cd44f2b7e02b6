"""Products with weights laid out once are those of `linear`; without torch's operators they are plain."""

import gc

import pytest
import torch
from torch.nn.functional import linear

from rein.engines import laid_out
from rein.engines.laid_out import lays_out, product_of


@pytest.fixture(autouse=True)
def precision():  # type: ignore[no-untyped-def]
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("rows", [1, 7, 128, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_is_that_of_linear(rows: int, bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, added = (torch.randn(*s, generator=generator).to(dtype) for s in ((rows, 40), (90, 40), (90,)))
    for named in ("highest", "medium"):
        torch.set_float32_matmul_precision(named)
        expected = linear(x, weight, added if bias else None)
        found = product_of(weight, added if bias else None)(x)
        close = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 0}[dtype]
        torch.testing.assert_close(found, expected, atol=close, rtol=close)


def test_float32_is_laid_out_only_where_onednn_multiplies_it() -> None:
    weight = torch.zeros(8, 8)
    torch.set_float32_matmul_precision("highest")
    assert not lays_out(weight)
    assert not lays_out(weight.double())


@pytest.mark.parametrize("broken", ["missing", "wrong"])
def test_without_the_operators_or_with_wrong_ones_products_are_plain(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(weight: torch.Tensor, bias: torch.Tensor | None) -> laid_out.Product:
        if broken == "missing":
            raise AttributeError
        return lambda x: linear(x, weight, bias) * 1.5

    monkeypatch.setattr(laid_out, "_laid_out", changed)
    laid_out._is_right.cache_clear()
    try:
        x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8, 8).bfloat16()
        assert not lays_out(weight)
        assert torch.equal(product_of(weight)(x), linear(x, weight))
    finally:
        laid_out._is_right.cache_clear()


def test_a_layout_is_freed_with_its_product() -> None:
    def laid() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.is_mkldnn for o in gc.get_objects())

    before = laid()
    product = product_of(torch.zeros(64, 64).bfloat16())
    held = laid() - before
    assert held == int(lays_out(torch.zeros(1, 1).bfloat16()))
    del product
    assert laid() == before
