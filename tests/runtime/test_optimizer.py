"""Steps applied or discarded, rates counted by step, and a state that is restored whole or not at all."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rein.config.recipe import Optim
from rein.errors import CheckpointError
from rein.runtime.optimizer import MOMENTS, Optimizer


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def made(model: nn.Module, total: int = 10, grad_clip: float = 1.0, **optim: object) -> Optimizer:
    return Optimizer(model, Optim(**{"lr": 0.1} | optim), grad_clip=grad_clip, total_steps=total)  # type: ignore[arg-type]


def copied(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, meta = optimizer.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, meta


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.arange(6.0).view(2, 3)
    (scale * model(x).square().sum()).backward()


def step(optimizer: Optimizer, model: nn.Module) -> float:
    backward(model)
    rate = optimizer.lr
    optimizer.apply(optimizer.grad_norm())
    return rate


def test_a_step_is_adamw_s_on_clipped_gradients() -> None:
    mine, theirs = linear(), linear()
    optimizer = made(mine, grad_clip=0.5, weight_decay=0.1)
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        step(optimizer, mine)
        backward(theirs)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        adam.step()
        adam.zero_grad()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_norm_is_over_all_gradients_and_asking_changes_nothing() -> None:
    model = linear()
    backward(model)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    optimizer = made(model)
    assert optimizer.grad_norm() == pytest.approx(expected, rel=1e-6)
    assert optimizer.grad_norm() > optimizer.grad_clip
    after = [p.grad for p in model.parameters()]
    assert all(torch.equal(g, h) for g, h in zip(gradients, after, strict=True) if h is not None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_gradient_entry_that_is_not_finite_shows_in_the_norm(value: float) -> None:
    model = linear()
    backward(model)
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = value
    assert not math.isfinite(made(model).grad_norm())


def test_a_discarded_step_leaves_weights_and_moments_bit_equal_and_the_schedule_goes_on() -> None:
    model = linear()
    optimizer = made(model, lr_scheduler_type="cosine")
    step(optimizer, model)
    before, _ = optimizer.state()
    before = {name: tensor.clone() for name, tensor in before.items()}
    rate = optimizer.lr
    backward(model, scale=math.nan)
    optimizer.discard()
    after, _ = optimizer.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.step == 2
    assert optimizer.lr < rate


def test_the_rate_ends_at_its_floor_exactly_at_the_last_step() -> None:
    model = linear()
    optimizer = made(model, total=12, lr=1e-3, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    rates = [step(optimizer, model) for _ in range(12)]
    assert rates[0] == 1e-3
    assert rates[-1] == pytest.approx(1e-4)
    assert rates == sorted(rates, reverse=True)
    assert min(rates[:-1]) > 1e-4
    assert optimizer.adam.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_warm_up_is_given_in_steps_or_as_a_share() -> None:
    shared = made(linear(), total=8, lr=1.0, lr_warmup_steps_ratio=0.5)
    counted = made(linear(), total=8, lr=1.0, lr_warmup_steps=4, lr_warmup_steps_ratio=0.9)
    for expected in (0.25, 0.5, 0.75, 1.0, 1.0):
        assert shared.lr == counted.lr == expected
        shared.discard()
        counted.discard()


def test_only_trainable_weights_are_held() -> None:
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = made(model)
    assert [name for name, _ in optimizer.named] == ["weight"]
    assert set(optimizer.state()[0]) == {"weight/weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_optimizer_goes_on_as_the_straight_run(dtype: torch.dtype) -> None:
    straight = linear().to(dtype)
    optimizer = made(straight, lr_scheduler_type="cosine")
    inputs = torch.arange(6.0, dtype=dtype).view(2, 3)

    def go(some: Optimizer, model: nn.Module, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            model(inputs).square().sum().backward()
            rates.append(some.lr)
            some.apply(some.grad_norm())
        return rates

    first = go(optimizer, straight, 5)
    tensors, meta = optimizer.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    resumed = linear(seed=9).to(dtype)
    other = made(resumed, lr_scheduler_type="cosine")
    other.restore(tensors, meta)
    assert go(other, resumed, 5) == go(optimizer, straight, 5)
    assert len(first) == 5
    for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_state_taken_is_not_moved_by_later_steps_of_the_restored() -> None:
    model = linear()
    optimizer = made(model)
    step(optimizer, model)
    tensors, meta = optimizer.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    optimizer.restore(tensors, meta)
    step(optimizer, model)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


@pytest.mark.parametrize("missing", ["weight/bias", "exp_avg/weight", "step/bias"])
def test_a_missing_part_is_an_error_not_a_fresh_start(missing: str) -> None:
    model = linear()
    optimizer = made(model)
    step(optimizer, model)
    tensors, meta = optimizer.state()
    with pytest.raises(CheckpointError, match=f"snapshot: {missing} is missing; resume from another"):
        made(linear()).restore({k: v for k, v in tensors.items() if k != missing}, meta)


ODD: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "weight/bias is float32 [1], not float32 [2]": lambda t: t.update({"weight/bias": torch.zeros(1)}),
    "weight/weight is float64 [2, 3], not float32": lambda t: t.update(
        {"weight/weight": t["weight/weight"].double()}
    ),
    "exp_avg_sq/bias is float32 [2, 1], not": lambda t: t.update({"exp_avg_sq/bias": torch.zeros(2, 1)}),
    "step/weight is float32 [1], not float32 []": lambda t: t.update({"step/weight": torch.zeros(1)}),
    "step/weight is int64 [], not float32 []": lambda t: t.update({"step/weight": torch.tensor(1)}),
    "weight/scale belongs to no weight that is trained": lambda t: t.update({"weight/scale": torch.ones(1)}),
    "max_exp_avg_sq/bias belongs to no weight": lambda t: t.update({"max_exp_avg_sq/bias": torch.ones(2)}),
    "exp_avg/bias is missing": lambda t: [t.pop(f"{key}/bias") for key in MOMENTS[1:]],
    "exp_avg/weight is missing": lambda t: [t.pop(f"{k}/{n}") for k in MOMENTS for n in ("weight", "bias")],
}


@pytest.mark.parametrize("said", list(ODD))
def test_a_state_that_does_not_fit_is_named_and_nothing_of_it_is_taken(said: str) -> None:
    model, other = linear(), linear(seed=5)
    optimizer, taker = made(model), made(other)
    for some, its in ((optimizer, model), (taker, other)):
        step(some, its)
    tensors, meta = copied(optimizer)
    before, counters = copied(taker)
    ODD[said](tensors)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        taker.restore(tensors, meta)
    after, counters_after = taker.state()
    assert counters == counters_after
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("missing", ["step", "still"])
def test_a_counter_that_is_missing_is_named(missing: str) -> None:
    optimizer = made(linear())
    tensors, meta = optimizer.state()
    with pytest.raises(CheckpointError, match=f"snapshot: {missing} is missing"):
        optimizer.restore(tensors, {key: value for key, value in meta.items() if key != missing})


def test_a_weight_that_no_gradient_reached_has_no_moments_and_needs_none() -> None:
    class Apart(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.unused = nn.Parameter(torch.ones(4))

    model = Apart()
    optimizer = made(model)
    step(optimizer, model)
    tensors, meta = copied(optimizer)
    assert meta["still"] == ["unused"]
    other = made(Apart())
    other.restore(tensors, meta)
    assert all(torch.equal(tensors[name], found) for name, found in other.state()[0].items())


def test_a_restore_drops_gradients_that_wait() -> None:
    model = linear()
    optimizer = made(model)
    step(optimizer, model)
    tensors, meta = copied(optimizer)
    backward(model)
    optimizer.restore(tensors, meta)
    assert all(p.grad is None for p in model.parameters())


def test_a_state_before_the_first_step_is_whole_too() -> None:
    model = linear()
    tensors, meta = made(model).state()
    other = made(linear(seed=3))
    other.restore(tensors, meta)
    assert torch.equal(other.parameters[0], model.weight)
