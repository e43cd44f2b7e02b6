"""What holds for every function of every table, on random rows: padding says nothing, order and cuts change
nothing, and no input makes a number that is not finite.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rein.functional.advantages import ESTIMATORS, INPUTS
from rein.functional.kl import KINDS, OFF_POLICY, kl_penalty, off_policy_kl, off_policy_kl_loss
from rein.functional.losses.aggregate import MODES, aggregate
from rein.functional.losses.m2po import m2po_mask
from rein.functional.losses.opsm import opsm_mask
from rein.functional.losses.table import LOSSES
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_mean, masked_var, whiten
from rein.functional.off_policy import correct, diagnostics
from rein.functional.presets import LEVELS, PRESETS, REJECTIONS
from rein.functional.rewards import PLACEMENTS, subtract_kl
from rein.functional.weights import importance_weights

NAMED: dict[str, dict[str, Any]] = {
    "clip": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
    "tau": {"tau_pos": 1.0, "tau_neg": 1.05},
    "beta": {"beta": 0.1},
}
KNOWN: dict[str, Any] = {word: value for some in NAMED.values() for word, value in some.items()}
ESTIMATOR_OPTIONS = {
    "gae": {"gamma": 0.9, "lam": 0.95},
    "vtrace": {"gamma": 0.9, "lam": 0.95, "threshold": 2.0},
    "monte_carlo": {"gamma": 0.9},
    "reinforce_plus_plus": {"gamma": 0.9},
}
GARBAGE = (math.nan, math.inf, -math.inf, 3e38, -7.0)
QUICK = settings(max_examples=20, deadline=None)

Batch = dict[str, Tensor]


def batch(seed: int, rows: int, length: int, scale: float, dtype: torch.dtype = torch.float64) -> Batch:
    """Random rows with holes, one of them without any token and one with a single one (where there are
    enough)."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=dtype)

    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0, -1] = True
    if rows > 2:
        mask[1] = False
        mask[2] = False
        mask[2, length // 2] = True
    behavior = -normal().abs()
    return {
        "mask": mask,
        "behavior": behavior,
        "old": behavior + scale * normal(),
        "log_probs": behavior + scale * normal(),
        "reference": behavior + scale * normal(),
        "advantages": normal(),
        "weights": normal().abs(),
        "values": normal(),
        "rewards": normal(),
        "groups": torch.randint(0, 2, (rows,), generator=generator),
        "row_values": normal()[:, 0],
    }


def each_row(some: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return {name: change(values) for name, values in some.items()}


def soiled(some: Batch, filler: float) -> Batch:
    """The same rows with something else wherever nothing counts."""
    mask = some["mask"]
    return {
        name: values.masked_fill(~mask, filler)
        if values.shape == mask.shape and values.is_floating_point()
        else values
        for name, values in some.items()
    }


BATCHES = st.builds(
    batch, st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7), st.sampled_from([0.0, 0.3, 3.0])
)
FAR = st.builds(batch, st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7), st.sampled_from([1e4]))


def options_of(name: str, some: Batch) -> dict[str, Any]:
    if name == "m2po":
        return {"kept": m2po_mask(some["log_probs"], some["behavior"], some["mask"])}
    return {word: KNOWN[word] for word in LOSSES[name].options}


def loss_of(
    name: str,
    some: Batch,
    options: dict[str, Any] | None = None,
    mode: str = "token-mean",
    **whole: float,
) -> tuple[Tensor, Tensor]:
    """The aggregated loss and its gradient with respect to the log-probs."""
    entry = LOSSES[name]
    log_probs = some["log_probs"].clone().requires_grad_(True)
    found = entry.compute(
        log_probs,
        some[entry.against],
        some["advantages"],
        some["weights"],
        some["mask"],
        **(options_of(name, some) if options is None else options),
    )
    for part in found:
        assert not part[~some["mask"]].any(), "something is said where nothing counts"
    loss = aggregate(found.losses, some["mask"], entry.aggregate or mode, **whole)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient


def estimate(name: str, some: Batch) -> tuple[Tensor, Tensor]:
    known = {
        "token_level_rewards": some["rewards"],
        "values": some["values"],
        "response_mask": some["mask"],
        "bootstrap_values": some["row_values"],
        "old_log_probs": some["old"],
        "behavior_log_probs": some["behavior"],
        "groups": some["groups"],
        "baseline_scores": some["row_values"],
    }
    return ESTIMATORS[name](*(known[word] for word in INPUTS[name]), **ESTIMATOR_OPTIONS.get(name, {}))


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# ---- padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(some=BATCHES, filler=st.sampled_from(GARBAGE))
@QUICK
def test_padding_changes_no_loss_and_no_gradient(name: str, some: Batch, filler: float) -> None:
    same(loss_of(name, soiled(some, filler)), loss_of(name, soiled(some, 0.0)))


@pytest.mark.parametrize("name", ESTIMATORS)
@given(some=BATCHES, filler=st.sampled_from(GARBAGE))
@QUICK
def test_padding_changes_no_advantage(name: str, some: Batch, filler: float) -> None:
    same(estimate(name, soiled(some, filler)), estimate(name, soiled(some, 0.0)))


@given(some=BATCHES, filler=st.sampled_from(GARBAGE))
@QUICK
def test_padding_changes_no_kl_value_or_critic_loss_and_no_gradient(some: Batch, filler: float) -> None:
    def all_of(rows: Batch) -> list[Tensor]:
        mask = rows["mask"]
        x = rows["log_probs"].clone().requires_grad_(True)
        values = rows["values"].clone().requires_grad_(True)
        found = [kl_penalty(x, rows["reference"], kind, mask=mask) for kind in KINDS]
        found.append(off_policy_kl_loss(x, rows["reference"], rows["behavior"], mask=mask))
        found.append(off_policy_kl(x, rows["reference"], rows["behavior"], mask=mask))
        found.append(value_loss(values, rows["old"], rows["rewards"], mask, cliprange_value=0.2)[0])
        total = sum((aggregate(part, mask, "token-mean") for part in found), torch.zeros(()))
        return [total.detach(), *torch.autograd.grad(total, [x, values])]

    same(all_of(soiled(some, filler)), all_of(soiled(some, 0.0)))


@given(some=BATCHES, filler=st.sampled_from(GARBAGE))
@QUICK
def test_padding_changes_no_weight_rejection_or_metric(some: Batch, filler: float) -> None:
    def all_of(rows: Batch) -> list[Any]:
        old, behavior, mask = rows["old"], rows["behavior"], rows["mask"]
        found: list[Any] = []
        for level in LEVELS:
            corrected = correct(
                old,
                behavior,
                mask,
                rollout_is=level,
                rollout_is_batch_normalize=True,
                rollout_rs=",".join(REJECTIONS),
                rollout_rs_threshold=2.0,
            )
            found += [corrected.weights, corrected.mask, *corrected.metrics.values()]
        found += diagnostics(old, behavior, mask, threshold="0.5_2.0").values()
        found += subtract_kl(
            rows["rewards"].where(mask, 0), old, rows["reference"], mask, kl_coef=0.1, kind="k1"
        )
        return [*found, whiten(rows["values"], mask), m2po_mask(old, behavior, mask)]

    same(all_of(soiled(some, filler)), all_of(soiled(some, 0.0)))


# ---- order and cuts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(some=BATCHES, seed=st.integers(0, 99))
@QUICK
def test_permuting_rows_permutes_gradients_and_keeps_the_loss(name: str, some: Batch, seed: int) -> None:
    order = torch.randperm(len(some["mask"]), generator=torch.Generator().manual_seed(seed))
    loss, gradient = loss_of(name, some)
    same(loss_of(name, each_row(some, lambda values: values[order])), (loss, gradient[order]))


@pytest.mark.parametrize("name", ESTIMATORS)
@given(some=BATCHES, seed=st.integers(0, 99))
@QUICK
def test_permuting_rows_permutes_advantages(name: str, some: Batch, seed: int) -> None:
    order = torch.randperm(len(some["mask"]), generator=torch.Generator().manual_seed(seed))
    found = estimate(name, each_row(some, lambda values: values[order]))
    same(found, tuple(part[order] for part in estimate(name, some)))


@given(some=BATCHES, seed=st.integers(0, 99))
@QUICK
def test_permuting_rows_permutes_weights_and_rejection_and_keeps_metrics(some: Batch, seed: int) -> None:
    order = torch.randperm(len(some["mask"]), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 1.0,
    }
    here = correct(some["old"], some["behavior"], some["mask"], **options)
    there = correct(some["old"][order], some["behavior"][order], some["mask"][order], **options)
    assert here.weights is not None
    same(there.weights, here.weights[order])
    assert torch.equal(there.mask, here.mask[order])
    same(there.metrics, here.metrics)


@pytest.mark.parametrize("name", LOSSES)
@given(some=BATCHES, seed=st.integers(0, 99), mode=st.sampled_from(MODES))
@QUICK
def test_any_cut_into_micro_batches_gives_the_same_loss_and_gradients(
    name: str, some: Batch, seed: int, mode: str
) -> None:
    """Each part is padded to its own longest row and knows the denominators of the whole."""
    mask = some["mask"]
    whole = {"tokens": float(mask.sum()), "rows": float(mask.any(1).sum()), "scale": 7.0}
    options = options_of(name, some)
    loss, gradient = loss_of(name, some, options, mode, **whole)
    part_of = torch.randint(0, 3, (len(mask),), generator=torch.Generator().manual_seed(seed))
    total, collected = torch.zeros((), dtype=loss.dtype), torch.zeros_like(gradient)
    for part in range(3):
        rows = (part_of == part).nonzero().flatten()
        if len(rows) == 0:
            continue
        width = max(int(mask[rows].any(0).nonzero().max()) + 1 if mask[rows].any() else 1, 1)

        def cut(values: Tensor, rows: Tensor = rows, width: int = width) -> Tensor:
            return values[rows] if values.dim() == 1 else values[rows, :width]

        own = {word: cut(value) if torch.is_tensor(value) else value for word, value in options.items()}
        here, slope = loss_of(name, each_row(some, cut), own, mode, **whole)
        total += here
        collected[rows[:, None], torch.arange(width)] = slope
    same(total, loss)
    same(collected, gradient)


# ---- finite ----------------------------------------------------------------------------------------------


def degenerate(some: Batch, shape: str) -> Batch:
    """Nothing counts, one token counts, or all rewards, advantages and values are equal."""
    mask = torch.zeros_like(some["mask"])
    if shape == "one token":
        mask[0, 0] = True
    if shape == "equal":
        mask = some["mask"]
        equal = {name: torch.full_like(some[name], 0.95) for name in ("rewards", "advantages", "values")}
        some = some | equal
    return some | {"mask": mask}


SHAPES = ("as it is", "nothing counts", "one token", "equal")


def finite(values: Any) -> bool:
    return bool(torch.as_tensor(values, dtype=torch.float64).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@given(some=FAR, shape=st.sampled_from(SHAPES))
@QUICK
def test_every_loss_and_gradient_is_finite_on_log_ratios_of_ten_thousand(
    dtype: torch.dtype, some: Batch, shape: str
) -> None:
    some = {name: v.to(dtype) if v.is_floating_point() else v for name, v in some.items()}
    if shape != "as it is":
        some = degenerate(some, shape)
    for name in LOSSES:
        loss, gradient = loss_of(name, some)
        assert finite(loss), name
        assert finite(gradient), name
    for kind in (*KINDS, OFF_POLICY):
        x = some["log_probs"].clone().requires_grad_(True)
        found = kl_penalty(x, some["reference"], kind, behavior_log_probs=some["behavior"])
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert finite(found), kind
        assert finite(gradient), kind
    values = (1e4 * some["values"]).requires_grad_(True)
    error, _ = value_loss(values, some["old"], some["rewards"], some["mask"], cliprange_value=0.2)
    for mode in MODES:
        (gradient,) = torch.autograd.grad(aggregate(error, some["mask"], mode), values, retain_graph=True)
        assert finite(gradient), mode


@given(some=FAR, shape=st.sampled_from(SHAPES))
@QUICK
def test_every_estimator_weight_and_metric_is_finite_on_log_ratios_of_ten_thousand(
    some: Batch, shape: str
) -> None:
    some = {name: v.float() if v.is_floating_point() else v for name, v in some.items()}
    if shape != "as it is":
        some = degenerate(some, shape)
    old, behavior, mask = some["old"], some["behavior"], some["mask"]
    for name in ESTIMATORS:
        for part in estimate(name, some):
            assert finite(part), name
            assert finite(whiten(part, mask)), name
    for name, preset in PRESETS.items():
        corrected = correct(
            old,
            behavior,
            mask,
            rollout_is=preset.rollout_is,
            rollout_is_threshold=preset.rollout_is_threshold,
            rollout_is_batch_normalize=True,
            rollout_rs=preset.rollout_rs,
            rollout_rs_threshold=preset.rollout_rs_threshold,
        )
        assert corrected.weights is None or finite(corrected.weights), name
        assert all(finite(value) for value in corrected.metrics.values()), corrected.metrics
    found = diagnostics(old, behavior, mask, threshold=2.0)
    assert all(finite(value) for value in found.values()), found
    for level in LEVELS:
        assert finite(importance_weights(old, behavior, mask, level=level, threshold=1e9).raw)
    assert finite(off_policy_kl(old, some["reference"], behavior))
    assert not opsm_mask(old, behavior, some["advantages"], mask, threshold=0.1)[~mask].any()
    for place in (PLACEMENTS["last"], PLACEMENTS["uniform"]):
        assert finite(place(some["row_values"], mask))


@given(some=BATCHES)
@QUICK
def test_means_and_whitening_pass_gradients_past_what_is_masked(some: Batch) -> None:
    values = soiled(some, math.nan)["values"].requires_grad_(True)
    mask = some["mask"]
    total = masked_mean(values, mask) + masked_var(values, mask) + whiten(values, mask).square().sum()
    (gradient,) = torch.autograd.grad(total, values)
    assert finite(gradient)
    assert not gradient[~mask].any()


# ---- the KL that is watched ------------------------------------------------------------------------------


@pytest.mark.parametrize("behavior_policy", ["the reference", "the actor", "another"])
def test_the_watched_kl_is_the_exact_one_in_the_mean_over_fresh_samples(behavior_policy: str) -> None:
    """5 tokens, 200,000 of them drawn from behavior: within four standard errors of the sum over the
    vocabulary."""
    generator = torch.Generator().manual_seed(7)
    actor, reference, another = torch.randn(3, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    behavior = {"the reference": reference, "the actor": actor, "another": another}[behavior_policy]
    exact = (actor.exp() * (actor - reference)).sum()
    ids = torch.multinomial(behavior.exp(), 200_000, replacement=True, generator=generator)
    found = off_policy_kl(actor[ids], reference[ids], behavior[ids])
    assert (found >= 0).all()
    error = found.std() / len(ids) ** 0.5
    assert abs(found.mean() - exact) < 4 * error
    assert error < 0.01 * exact
    expectation = (behavior.exp() * off_policy_kl(actor, reference, behavior)).sum()
    same(expectation, exact)
