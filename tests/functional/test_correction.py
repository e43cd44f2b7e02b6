"""Weights of whole responses, two-sided bounds, rejection and the presets, by hand."""

import math

import pytest
import torch

from rein.functional.off_policy import correct
from rein.functional.presets import (
    LEVELS,
    LOSS_TYPES,
    PRESETS,
    REJECTIONS,
    rejection_bounds,
    weight_bounds,
)
from rein.functional.weights import importance_weights

T, F = True, False
MASK = torch.tensor([[T, T, F], [T, T, T], [F, F, F]])
RATIOS = torch.tensor([[4.0, 0.5, 99.0], [0.5, 1.0, 0.25], [7.0, 7.0, 7.0]])  # old / behavior
ZEROS = torch.zeros(3, 3)


def weights(level: str, threshold: float | str, **options: bool) -> list[list[float]]:
    found = importance_weights(RATIOS.log(), ZEROS, MASK, level=level, threshold=threshold, **options)
    return found.applied.tolist()


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected, dtype=torch.float32))


def test_weights_of_tokens_responses_and_geometric_means() -> None:
    close(weights("token", 99.0), [[4, 0.5, 0], [0.5, 1, 0.25], [0, 0, 0]])
    close(weights("sequence", 99.0), [[2, 2, 0], [0.125, 0.125, 0.125], [0, 0, 0]])
    close(weights("geometric", 99.0), [[2**0.5, 2**0.5, 0], [0.5, 0.5, 0.5], [0, 0, 0]])
    with pytest.raises(ValueError, match="'row' is unknown; known: token"):
        weights("row", 2.0)


def test_one_bound_cuts_and_two_zero_what_lies_outside() -> None:
    close(weights("token", 0.75), [[0.75, 0.5, 0], [0.5, 0.75, 0.25], [0, 0, 0]])
    close(weights("token", "0.5_2.0"), [[0, 0.5, 0], [0.5, 1, 0], [0, 0, 0]])
    close(weights("sequence", "0.5_2.0"), [[2, 2, 0], [0, 0, 0], [0, 0, 0]])


def test_batch_normalisation_divides_by_the_mean_of_what_is_applied() -> None:
    """Tokens: (2 + .5 + .5 + 1 + .25) / 5. Responses: (2 + .125) / 2, the empty row left out."""
    close(
        weights("token", 2.0, batch_normalize=True),
        [[2 / 0.85, 0.5 / 0.85, 0], [0.5 / 0.85, 1 / 0.85, 0.25 / 0.85], [0, 0, 0]],
    )
    close(weights("sequence", 2.0, batch_normalize=True)[1:2], [[0.125 / 1.0625] * 3])


def test_weights_that_are_all_zero_stay_zero_and_their_effective_sample_is_0() -> None:
    found = correct(
        RATIOS.log(),
        ZEROS,
        MASK,
        rollout_is="token",
        rollout_is_threshold="8_9",
        rollout_is_batch_normalize=True,
    )
    assert found.weights is not None
    assert (found.weights == 0).all()
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert found.metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert found.metrics["rollout_corr/rollout_is_oob_ratio"] == 1


def kept(names: str, threshold: float | str) -> list[list[bool]]:
    found = correct(RATIOS.log(), ZEROS, MASK, rollout_rs=names, rollout_rs_threshold=threshold)
    return found.mask.tolist()


ALL_OF_0, ALL_OF_1, NONE = [T, T, F], [T, T, T], [F, F, F]


@pytest.mark.parametrize(
    ("names", "threshold", "expected"),
    [
        # k1 bounds are on behavior / old: 1/4, 2 | 2, 1, 4
        ("token_k1", "0.5_2.0", [[F, T, F], [T, T, F]]),
        ("token_k1", 4.0, [ALL_OF_0, ALL_OF_1]),
        ("token_k1", 2, [[F, T, F], [T, T, F]]),
        # k2: .961, .240 | .240, 0, .961
        ("token_k2", 0.5, [[F, T, F], [T, T, F]]),
        # k3 = w - 1 - log w: 1.614, .193 | .193, 0, .636
        ("token_k3", "0.7", [[F, T, F], [T, T, T]]),
        # sums of k1: -log 2 | log 8, that is ratios 1/2 | 8
        ("seq_sum_k1", "0.4_7.0", [ALL_OF_0, NONE]),
        ("seq_sum_k1", "0.6_9.0", [NONE, ALL_OF_1]),
        ("seq_sum_k2", 1.2014, [ALL_OF_0, ALL_OF_1]),
        ("seq_sum_k3", 1.0, [NONE, ALL_OF_1]),
        # means: ratios 2^-1/2 | 2
        ("seq_mean_k1", "0.7_1.9", [ALL_OF_0, NONE]),
        ("seq_mean_k2", 0.5, [NONE, ALL_OF_1]),
        ("seq_mean_k3", 0.5, [NONE, ALL_OF_1]),
        ("seq_max_k2", 0.9, [NONE, NONE]),
        ("seq_max_k3", 0.7, [NONE, ALL_OF_1]),
        # all rules must hold
        ("token_k1,seq_mean_k3", "0.5_2.0,0.5", [NONE, [T, T, F]]),
        ("token_k2, token_k3", 0.7, [[F, T, F], [T, T, F]]),
    ],
)
def test_what_each_rule_rejects(names: str, threshold: float | str, expected: list[list[bool]]) -> None:
    assert kept(names, threshold) == [*expected, NONE]


def test_every_rule_is_tried_above() -> None:
    tried = {
        name.strip()
        for mark in test_what_each_rule_rejects.pytestmark  # type: ignore[attr-defined]
        for row in mark.args[1]
        for name in row[0].split(",")
    }
    assert tried == set(REJECTIONS)


def test_rejection_changes_no_weight() -> None:
    options = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    plain = correct(RATIOS.log(), ZEROS, MASK, **options)
    found = correct(RATIOS.log(), ZEROS, MASK, rollout_rs="seq_sum_k3", rollout_rs_threshold=1.0, **options)
    assert found.weights is not None
    assert plain.weights is not None
    assert torch.equal(found.weights, plain.weights)
    assert found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
    assert found.metrics["rollout_corr/rollout_rs_seq_sum_k3_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 5)


def test_distances_by_hand() -> None:
    """z = log 4, -log 2 | -log 2, 0, -log 4 and an empty row."""
    found = correct(RATIOS.log(), ZEROS, MASK).metrics
    log = math.log(2)
    assert found["rollout_corr/kl"] == pytest.approx(2 * log / 5)
    assert found["rollout_corr/k2_kl"] == pytest.approx((4 + 1 + 1 + 0 + 4) * log**2 / 2 / 5)
    assert found["rollout_corr/k3_kl"] == pytest.approx((4 + 0.5 + 0.5 + 1 + 0.25 - 5 + 2 * log) / 5)
    assert found["rollout_corr/chi2_token"] == pytest.approx((16 + 0.25 + 0.25 + 1 + 0.0625) / 5 - 1)
    assert found["rollout_corr/chi2_seq"] == pytest.approx((4 + 1 / 64 + 1) / 3 - 1)
    assert found["rollout_corr/log_ppl_diff_max"] == pytest.approx(log)


@pytest.mark.parametrize("threshold", ["", "a", "1_2_3", 0, -1.0, "0_2", "-1_2", "3_2", True, "nan", "1_x"])
def test_bounds_of_weights_that_make_no_sense_are_refused(threshold: float | str) -> None:
    with pytest.raises(ValueError, match="rollout_is_threshold: "):
        weight_bounds(threshold)


def test_bounds_are_read_as_verl_reads_them() -> None:
    assert weight_bounds(2.0) == weight_bounds(" 2 ") == (None, 2.0)
    assert weight_bounds("0.5_5.0") == (0.5, 5.0)
    assert rejection_bounds("token_k1", 4) == {"token_k1": (0.25, 4.0)}
    found = rejection_bounds("token_k1, seq_sum_k3,token_k1", "0.5_2.0,0.1")
    assert found == {"token_k1": (0.5, 2.0), "seq_sum_k3": (None, 0.1)}
    assert rejection_bounds("token_k2,token_k3", 0.3) == dict.fromkeys(("token_k2", "token_k3"), (None, 0.3))


@pytest.mark.parametrize(
    ("names", "threshold", "message"),
    [
        ("token_k4", 1, "'token_k4' is unknown; known: token_k1"),
        ("seq_max_k1", 1, "'seq_max_k1' is unknown"),
        ("", 1, "1 thresholds for the 0 rules"),
        ("token_k2", None, "0 thresholds for the 1 rules"),
        ("token_k2,token_k3", "1,2,3", "3 thresholds for the 2 rules"),
        ("token_k2", "0.5_2.0", "two bounds"),
        ("token_k1", 0.5, "empty interval"),
        ("token_k1", "2_0.5", "must be positive"),
        ("token_k1", "inf", "must be positive and finite"),
        ("token_k1", "0.5_inf", "must be positive and finite"),
        ("token_k1", "nan", "must be positive and finite"),
        ("token_k1", "1e-320_5", "must be positive and finite"),
        ("token_k3", 1e308, "must be positive and finite"),
    ],
)
def test_rules_and_thresholds_that_do_not_fit_are_refused(
    names: str, threshold: float | str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rejection_bounds(names, threshold)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_applied(name: str) -> None:
    preset = PRESETS[name]
    assert preset.rollout_is in (None, *LEVELS)
    assert preset.loss_type in LOSS_TYPES
    assert preset.bypass_mode is name.startswith("bypass")
    assert ("pg" in name) == (preset.loss_type == "reinforce")
    found = correct(
        RATIOS.log(),
        ZEROS,
        MASK,
        rollout_is=preset.rollout_is,
        rollout_is_threshold=preset.rollout_is_threshold,
        rollout_is_batch_normalize=preset.rollout_is_batch_normalize,
        rollout_rs=preset.rollout_rs,
        rollout_rs_threshold=preset.rollout_rs_threshold,
    )
    assert (found.weights is None) == (preset.rollout_is is None)
    assert (found.mask == MASK).all() or preset.rollout_rs is not None
    assert all(math.isfinite(value) for value in found.metrics.values())


def test_the_presets_are_verls() -> None:
    assert len(PRESETS) == 19
    assert PRESETS["decoupled_token_icepop"].rollout_is_threshold == "0.5_5.0"
    assert PRESETS["decoupled_geo_rs_token_tis"].rollout_rs_threshold == "0.999_1.001"
    assert PRESETS["bypass_pg_geo_rs_seq_tis"].rollout_is == "sequence"
    assert PRESETS["decoupled_k3_rs"].rollout_is is None
