"""Fused steps are the modules' own: values and gradients, adapters respected."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, LlamaConfig

from rein.models.block_steps import gated, rms_norm
from rein.models.forwards import sum_in_place, use_own_forwards
from rein.models.products import Plain


def small(act: str = "silu", *, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        hidden_act=act, mlp_bias=bias,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def assert_same(found: Tensor, own: Tensor, given: list[Tensor]) -> None:
    """Values, and gradients for all that was given."""
    torch.testing.assert_close(found, own, atol=1e-12, rtol=0)
    for one, other in zip(taken(found, given), taken(own, given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def taken(said: Tensor, given: list[Tensor]) -> list[Tensor | None]:
    for tensor in given:
        tensor.grad = None
    said.sin().sum().backward()
    return [tensor.grad for tensor in given]


def test_the_gated_layer_and_its_gradients_are_the_formulas() -> None:
    torch.manual_seed(0)
    sizes = ((2, 3, 5), (7, 5), (7, 5), (5, 7))
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    x, gate, up, down = given
    products = [Plain(weight) for weight in (gate, up, down)]
    found, own = gated(x, products, given[1:]), linear(silu(linear(x, gate)) * linear(x, up), down)
    assert_same(found, own, given)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6), (1, 2, 3, 6)])
def test_the_norm_and_its_gradients_are_the_formulas(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (shape, (6,))]
    x, weight = given
    found = rms_norm(x, weight, 1e-3)
    own = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight
    assert_same(found, own, given)


def test_the_norm_in_bfloat16_sums_in_float32() -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(50, 64), torch.rand(64), torch.randn(50, 64)
    half = [t.bfloat16().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    rms_norm(*half, 1e-6).backward(grad.bfloat16())
    rms_norm(*wide, 1e-6).backward(grad.bfloat16().double())
    for one, other in zip(half, wide, strict=True):
        assert (one.grad.double() - other.grad).norm() < 4e-3 * other.grad.norm()  # rounded once at the end


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_and_its_gradients_are_the_layer_s_own(bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = (
        nn.Linear(5, 7, bias=bias).double(),
        torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True),
    )
    own, given = layer(x), [x, *layer.parameters()]
    sum_in_place(layer)
    assert_same(layer(x), own, given)


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_s_gradients_are_its_own(padding: int | None) -> None:
    torch.manual_seed(0)
    table, ids = nn.Embedding(9, 4, padding_idx=padding).double(), torch.tensor([[1, 2, 2], [8, 1, 1]])
    own = table(ids)
    sum_in_place(table)
    assert_same(table(ids), own, [table.weight])


def test_gradients_of_micro_batches_add_up() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 7).double(), torch.randn(3, 5, dtype=torch.float64)
    (layer(x[:1]).sin().sum() + layer(x[1:]).sin().sum()).backward()
    own = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    sum_in_place(layer)
    layer(x[:1]).sin().sum().backward()
    layer(x[1:]).sin().sum().backward()
    for p, other in zip(layer.parameters(), own, strict=True):
        torch.testing.assert_close(p.grad, other, atol=1e-12, rtol=0)


class OnePlusRMSNorm(nn.Module):
    """As Gemma's: another formula under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(6)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + self.weight, self.eps)


def test_a_norm_of_another_formula_is_left_alone() -> None:
    assert use_own_forwards(nn.Sequential(OnePlusRMSNorm())) == 0


def test_a_model_gives_the_same_loss_and_gradients_with_it() -> None:
    plain = small()
    model = copy.deepcopy(plain)
    assert use_own_forwards(model) == 2 + 5 + 2  # gated layers, norms, attention
    ids = torch.randint(0, 17, (3, 6), generator=torch.Generator().manual_seed(1))
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("act", "bias"), [("gelu", False), ("silu", True)])
def test_another_function_or_a_bias_is_left_alone(act: str, bias: bool) -> None:
    assert use_own_forwards(small(act, bias=bias)) == 5 + 2  # norms and attention alone


def test_of_zeros_nothing_can_be_told() -> None:
    """A gelu and a silu are the same before a projection of zeros, and will not be once it has learned."""
    model = small("gelu", bias=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
    assert use_own_forwards(model) == 5  # norms


def test_frozen_weights_get_no_gradient_and_a_copy_reads_its_own() -> None:
    model = small()
    use_own_forwards(model)
    frozen = copy.deepcopy(model).requires_grad_(False)
    ids = torch.tensor([[1, 2, 3]])
    before = frozen(input_ids=ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(frozen(input_ids=ids).logits, before)
    assert not before.requires_grad


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_adapters_on_a_projection_are_read() -> None:
    model = small()
    use_own_forwards(model)
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    assert not torch.allclose(adapted(input_ids=ids).logits, before)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(input_ids=ids).logits, before)
