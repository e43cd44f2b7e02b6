"""The losses beside PPO's against hand answers: values, what is cut, and where gradients go."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.bypass import bypass
from rein.functional.losses.m2po import m2po_mask
from rein.functional.losses.opsm import opsm_mask
from rein.functional.losses.result import PolicyLoss
from rein.functional.losses.table import LOSSES, PER_ROW

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
ANCHOR = -1.0


def loss(
    name: str, ratios: list[float], advantages: list[float], **options: Any
) -> tuple[list[float], list[float], PolicyLoss]:
    """Losses and gradients of one row whose ratios are given, the denominator's log-probs being -1."""
    against = torch.full((1, len(ratios)), ANCHOR, dtype=torch.float64)
    log_probs = (against + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_(True)
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    weights = options.pop("weights", None)
    weights = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    found = LOSSES[name].compute(
        log_probs, against, torch.tensor([advantages], dtype=torch.float64), weights, mask, **options
    )
    total = aggregate(found.losses, mask, LOSSES[name].aggregate or "token-sum")
    (gradient,) = torch.autograd.grad(total, log_probs)
    return found.losses[0].tolist(), gradient[0].tolist(), found


def test_gspo_has_one_ratio_per_response() -> None:
    """Ratios 2 and 1/2 have geometric mean 1: nothing is cut, each token has half of the gradient of A."""
    losses, gradient, found = loss("gspo", [2.0, 0.5], [1.0, 1.0], **CLIP)
    assert losses == pytest.approx([-1, -1])
    assert gradient == pytest.approx([-0.5, -0.5])
    assert not found.clipped.any()
    losses, gradient, found = loss("gspo", [2.0, 2.0], [1.0, 1.0], **CLIP)
    assert losses == pytest.approx([-1.2, -1.2])
    assert gradient == [0, 0]
    assert found.clipped.all()


def test_cispo_cuts_the_weight_and_keeps_every_gradient() -> None:
    losses, gradient, found = loss("cispo", [2.0, 0.5, 1.1], [1.0, 1.0, -2.0], **CLIP)
    assert gradient == pytest.approx([-1.2, -0.8, 2.2])
    assert losses[0] == pytest.approx(-1.2 * (ANCHOR + math.log(2)))
    assert found.clipped.tolist() == [[True, True, False]]


def test_geo_mean_by_hand() -> None:
    """A > 0: log 2 is cut to .2, log 1/2 is not; the mean of (.2, -log 2)."""
    losses, gradient, found = loss("geo_mean", [2.0, 0.5], [1.0, 1.0], **CLIP)
    ratio = math.exp((0.2 - math.log(2)) / 2)
    assert losses == pytest.approx([-ratio, -ratio])
    assert gradient == pytest.approx([0, -ratio / 2])
    assert found.clipped.tolist() == [[True, True]]
    weighed, _, _ = loss("geo_mean", [2.0, 0.5], [1.0, 1.0], weights=[4.0, 1.0], **CLIP)
    assert weighed == pytest.approx([-2 * ratio] * 2)
    bad, _, found = loss("geo_mean", [2.0, 0.5], [-1.0, -1.0], **CLIP)
    assert bad[0] == pytest.approx(math.exp((math.log(2) - 0.2) / 2))
    assert found.clipped_lower.all()


def test_sapo_has_the_gradient_of_the_plain_surrogate_at_ratio_1_and_less_beyond() -> None:
    losses, gradient, _ = loss("sapo", [1.0, 1.0], [2.0, -2.0], tau_pos=1.0, tau_neg=1.05)
    assert losses == pytest.approx([-2 * 2, 2 * 2 / 1.05])
    assert gradient == pytest.approx([-1.0, 1.0])  # halved: a mean over two tokens
    _, far, _ = loss("sapo", [4.0, 4.0], [2.0, -2.0], tau_pos=1.0, tau_neg=1.05)
    assert abs(far[1]) < abs(far[0]) < 4


def test_gpg_is_reinforce_with_weights() -> None:
    losses, gradient, _ = loss("gpg", [1.0, 1.0], [2.0, -1.0], weights=[0.5, 2.0])
    assert losses == [-1.0 * ANCHOR, 2.0 * ANCHOR]
    assert gradient == [-1.0, 2.0]


def test_dro_pulls_back_to_where_the_advantage_is_beta_times_the_log_ratio() -> None:
    losses, gradient, _ = loss("dro", [math.exp(4.0), 1.0], [2.0, 2.0], beta=0.5)
    assert gradient == pytest.approx([0.0, -2.0])
    assert losses[0] == pytest.approx(0.25 * 16 - 2 * 3)
    with pytest.raises(ValueError, match="beta 0 must be above 0"):
        loss("dro", [1.0], [1.0], beta=0)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_lets_go_of_tokens_that_moved_far_the_wanted_way(name: str) -> None:
    """p from e^-1 = .368 to .736: far for A > 0; for A < 0 that is the other way, and stays."""
    options = {"clip_ratio_low": 0.09, "clip_ratio_high": 0.09, "clip_ratio_c": 3.0}
    losses, gradient, found = loss(name, [2.0, 2.0, 0.5, 1.1], [1.0, -1.0, -1.0, 1.0], **options)
    assert gradient == pytest.approx([0, 2, 0, -1.1])
    assert losses[0] == losses[2] == 0
    assert found.clipped.tolist() == [[True, False, True, False]]


def test_dppo_cuts_the_ratio() -> None:
    options = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.9, "clip_ratio_c": 1.5}
    _, gradient, found = loss("dppo_tv", [2.0], [-1.0], **options)
    assert gradient == [1.5]
    assert found.clipped_lower.all()


def test_topr_imitates_good_responses_and_leaves_bad_ones_once_they_are_unlikely() -> None:
    """The ratio is of the whole response: 1/2 * 1/2 for the bad one, cut at 1 where it became likelier."""
    _, good, _ = loss("topr", [0.5, 0.5], [2.0, 2.0])
    assert good == [-2, -2]
    _, bad, found = loss("topr", [0.5, 0.5], [-2.0, -2.0])
    assert bad == pytest.approx([0.5, 0.5])
    assert not found.clipped.any()
    _, likelier, found = loss("topr", [2.0, 2.0], [-2.0, -2.0])
    assert likelier == [2, 2]
    assert not found.clipped.any()  # at its bound is where every bad response starts: no sign of drift
    _, mixed, _ = loss("topr", [0.5, 0.5], [1.0, -1.0])
    assert mixed == pytest.approx([-1, 0.25])


def test_awr_imitates_by_the_exponential_of_the_advantage_cut_at_20() -> None:
    _, gradient, found = loss("awr", [3.0, 1.0, 1.0], [0.0, 1.0, 100.0])
    assert gradient == pytest.approx([-1, -math.e, -20])
    assert found.clipped.tolist() == [[False, False, True]]
    _, soft, _ = loss("awr", [1.0], [1.0], beta=2.0)
    assert soft == pytest.approx([-math.exp(0.5)])
    with pytest.raises(ValueError, match="beta 0 must be above 0"):
        loss("awr", [1.0], [1.0], beta=0)


def row_of(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_m2po_drops_the_furthest_tokens_until_the_mean_square_is_small() -> None:
    """Squares .01, .04, .09, .16: mean .075; without the last .0467; without the last two .025."""
    log_ratio = row_of(0.1, -0.2, 0.3, -0.4)
    mask = torch.ones(1, 4, dtype=torch.bool)
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    for threshold, kept in ((0.08, 4), (0.05, 3), (0.04, 2), (0.005, 0)):
        found = m2po_mask(log_ratio, zeros, mask, threshold=threshold)
        assert found.tolist() == [[i < kept for i in range(4)]]
    counted = torch.tensor([[True, False, True, True]])
    assert m2po_mask(log_ratio, zeros, counted, threshold=0.05).tolist() == [[True, False, True, False]]


def test_tokens_as_far_as_each_other_stay_or_go_together() -> None:
    log_ratio = row_of(0.1, 0.3, -0.3, 0.3)
    zeros, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    assert m2po_mask(log_ratio, zeros, mask, threshold=0.06).tolist() == [[True, False, False, False]]


def test_m2po_trains_on_what_is_kept_without_a_clip() -> None:
    kept = torch.tensor([[True, False]])
    losses, gradient, found = loss("m2po", [3.0, 3.0], [1.0, 1.0], kept=kept)
    assert losses == pytest.approx([-3, 0])
    assert gradient == pytest.approx([-3, 0])
    assert found.clipped.tolist() == [[False, True]]


def test_opsm_drops_bad_responses_that_the_actor_has_left() -> None:
    behavior = torch.full((4, 2), -1.0)
    far, near = torch.full((2,), -1.5), torch.full((2,), -1.05)
    log_probs = torch.stack([far, far, near, far])
    advantages = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    found = opsm_mask(log_probs, behavior, advantages, mask, threshold=0.1)
    assert found.tolist() == [[False, False], [True, False], [True, True], [False, False]]


def test_sppo_pulls_the_log_ratio_of_a_response_to_its_scaled_win_rate() -> None:
    """eta (P - 1/2) = 10 * .25; the log-ratio is 2 log 2."""
    gap = 2 * math.log(2) - 2.5
    losses, gradient, _ = loss("sppo", [2.0, 2.0], [0.25, 0.25], eta=10.0)
    assert losses == pytest.approx([gap**2] * 2)
    assert gradient == pytest.approx([2 * gap] * 2)


def test_imitation_reads_no_advantage() -> None:
    losses, gradient, _ = loss("nll", [1.0, 1.0], [math.nan, -5.0])
    assert losses == [1.0, 1.0]
    assert gradient == [-1.0, -1.0]


def test_losses_of_whole_responses_do_not_depend_on_their_length() -> None:
    """Their loss stands at each token, so the mean of row means is the mean over responses."""
    for name in ("geo_mean", "sppo"):
        assert LOSSES[name].aggregate == PER_ROW
    short, _, _ = loss("geo_mean", [1.1], [1.0], **CLIP)
    long, _, _ = loss("geo_mean", [1.1] * 5, [1.0] * 5, **CLIP)
    assert short == pytest.approx(long[:1])


def bypassed(loss_type: str, **options: Any) -> tuple[list[float], Any]:
    behavior = torch.full((2, 2), -1.0)
    log_probs = (behavior + torch.tensor([[4.0, 1.0], [0.5, 1.0]]).log()).requires_grad_(True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    found, corrected = bypass(
        log_probs,
        behavior,
        torch.ones(2, 2),
        mask,
        loss_type=loss_type,
        clip_ratio_c=3.0,
        **CLIP,
        **options,
    )
    (gradient,) = torch.autograd.grad(found.losses.sum(), log_probs)
    return gradient.flatten().tolist(), corrected


def test_in_bypass_mode_the_clip_bounds_the_ratio_to_behavior_and_no_weight_is_put_on_top() -> None:
    gradient, corrected = bypassed("ppo_clip", rollout_is="token")
    assert gradient == pytest.approx([0, -1, -0.5, -1])
    assert corrected.metrics["rollout_corr/rollout_is_max"] == 2


def test_in_bypass_mode_reinforce_is_weighed_by_the_actor_as_it_is() -> None:
    gradient, _ = bypassed("reinforce", rollout_is="token")
    assert gradient == pytest.approx([-2, -1, -0.5, -1])
    gradient, corrected = bypassed("reinforce", rollout_rs="token_k1", rollout_rs_threshold="0.4_3.0")
    assert gradient == pytest.approx([0, -1, -1, -1])  # behavior / actor = 1/4 lies outside
    assert corrected.mask.tolist() == [[False, True], [True, True]]
    with pytest.raises(ValueError, match="'dpo' is unknown; known: ppo_clip, reinforce"):
        bypassed("dpo")
