"""Numbers that verl 0.9.1 gave for its own functions on random tensors: outputs, metrics and gradients.

Every number of every case is compared. Where our rule is another one on purpose, `DIFFERENCES` says which
cases, why, and what verl's numbers become under our rule; that is then compared. The cases lie beside this
file; `REIN_GOLDEN=<folder>` checks another set of the same form.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rein.data.balance import balanced_groups, balanced_micro_batches
from rein.functional.advantages import ESTIMATORS, WHITENED
from rein.functional.kl import adaptive_kl_coef, kl_penalty
from rein.functional.log_probs import entropy_of, log_probs_of
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.bypass import bypass
from rein.functional.losses.result import PolicyLoss
from rein.functional.losses.table import LOSSES
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_mean, masked_sum, masked_var, whiten
from rein.functional.off_policy import correct
from rein.functional.rewards import overlong, place_on_last_token, subtract_kl
from rein.functional.schedules import lr_multiplier

FOLDER = Path(os.environ.get("REIN_GOLDEN", Path(__file__).parent))
TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}
ADAPTED_AT_MOST = 60  # cases

Case = dict[str, Any]
Given = dict[str, Tensor]
Found = dict[str, Any]
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}  # verl's defaults
TAU = {"tau_pos": 1.0, "tau_neg": 1.05}


def mask_of(given: Given) -> Tensor:
    """The case's mask under whichever name it has, as bool."""
    found = next(given[name] for name in ("mask", "response_mask", "loss_mask") if name in given)
    return found.bool()


# ---- where our rule is another one -----------------------------------------------------------------------


class Difference(NamedTuple):
    """Which cases, why, and verl's expected numbers turned into ours."""

    why: str
    applies: Callable[[Case, Given], bool]
    turned: Callable[[Case, Given, Found], Found]


def zero_where_masked(case: Case, given: Given, expected: Found) -> Found:
    mask = mask_of(given)
    return {name: value.where(mask, 0) for name, value in expected.items()}


def leaves_garbage(case: Case, given: Given) -> bool:
    functions = ("masked_whiten", "compute_gae_advantage_return", "adv_remax")
    return case["func"] in functions and not bool(mask_of(given).all())


def scaled_mean(case: Case, given: Given, expected: Found) -> Found:
    values, mask = given["values"], mask_of(given)
    mean, scale = masked_mean(values, mask), torch.rsqrt(masked_var(values, mask) + 1e-8)
    return {"out": (expected["out"] + mean * (scale - 1)).where(mask, 0)}


def all_weights_zero(case: Case, given: Given, expected: Found) -> Found:
    mask = mask_of(given)
    return {
        "rollout_is_weights": torch.zeros(mask.shape),
        "rollout_corr/rollout_is_eff_sample_size": 0.0,
        "rollout_corr/rollout_is_oob_ratio": 1.0,
    }


def one_step_ahead(case: Case, given: Given, expected: Found) -> Found:
    args, rates = case["args"], expected["lr"]
    first = 0 if args.get("zero_indexed_step", True) else 1  # the step of verl's that rates[0] belongs to
    warmup, last = args["num_warmup_steps"], args.get("num_training_steps", args["n"] - 1)
    shown = {step: rates[step - first] for step in range(first, min(last + 1, first + len(rates)))}
    return {
        "warm-up": [rate for step, rate in shown.items() if 0 < step <= warmup],
        "after": [rate for step, rate in shown.items() if step > warmup],
    }


DIFFERENCES = {
    "masked positions": Difference(
        "verl leaves finite garbage at masked positions of what it whitens or sums up; ours is 0 there, so "
        "that nothing can be read from padding",
        leaves_garbage,
        zero_where_masked,
    ),
    "scale only": Difference(
        "verl adds the mean back, unscaled; scaling alone scales the mean too",
        lambda case, given: case["func"] == "masked_whiten" and not case["args"]["shift_mean"],
        scaled_mean,
    ),
    "all weights zero": Difference(
        "verl divides by zero when every weight is 0, which stored data reaches; the effective sample size "
        "is 0",
        lambda case, given: case["func"] == "rollout_correction_raises",
        all_weights_zero,
    ),
    "learning rate": Difference(
        "verl's first update has rate 0 and moves nothing, and its floor comes a step after the last update; "
        "ours is one step ahead in warm-up and reaches the floor at the last update",
        lambda case, given: case["func"].startswith("lr_"),
        one_step_ahead,
    ),
}


def adapted(case: Case, given: Given) -> list[Difference]:
    return [difference for difference in DIFFERENCES.values() if difference.applies(case, given)]


# ---- our functions, called as the cases ask ----------------------------------------------------------------


def summed(case: Case, given: Given) -> Found:
    values, mask = given["values"], mask_of(given)
    return {"all": masked_sum(values, mask), "row": masked_sum(values, mask, -1)}


def meaned(case: Case, given: Given) -> Found:
    values, mask = given["values"], mask_of(given)
    return {"all": masked_mean(values, mask), "row": masked_mean(values, mask, -1)}


def variance(case: Case, given: Given) -> Found:
    values, mask = given["values"], mask_of(given)
    return {"unbiased": masked_var(values, mask), "biased": masked_var(values, mask, unbiased=False)}


def whitened(case: Case, given: Given) -> Found:
    return {"out": whiten(given["values"], mask_of(given), center=case["args"]["shift_mean"])}


def penalty(case: Case, given: Given) -> Found:
    return {"kld": kl_penalty(given["logprob"], given["ref_logprob"], case["args"]["kl_penalty"])}


def adaptive(case: Case, given: Given) -> Found:
    args = case["args"]
    coef, values = args["init_kl_coef"], []
    for kl, rows in zip(args["current_kl"], args["n_steps"], strict=True):
        coef = adaptive_kl_coef(coef, kl, rows=rows, target_kl=args["target_kl"], horizon=args["horizon"])
        values.append(coef)
    return {"values": values}


def fixed(case: Case, given: Given) -> Found:
    return {"value": case["args"]["kl_coef"]}


def in_reward(case: Case, given: Given) -> Found:
    args, mask, coef = case["args"], mask_of(given), case["args"]["init_kl_coef"]
    scores, old, ref = (given[name] for name in ("token_level_scores", "old_log_probs", "ref_log_prob"))
    rewards, kl = subtract_kl(scores, old, ref, mask, kl_coef=coef, kind=args["kl_penalty"])
    current = masked_mean(kl, mask, -1).mean().item()
    after = adaptive_kl_coef(
        coef, current, rows=len(kl), target_kl=args["target_kl"], horizon=args["horizon"]
    )
    return {
        "token_level_rewards": rewards,
        "actor/reward_kl_penalty": current,
        "actor/reward_kl_penalty_coeff": coef,
        "kl_coef_after": after,
    }


def rewards_of(case: Case, given: Given) -> Found:
    scores, coef = given["token_level_scores"], case["args"]["kl_ratio"]
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    old, ref = given["old_log_prob"], given["ref_log_prob"]
    return {"out": subtract_kl(scores, old, ref, everywhere, kl_coef=coef, kind="kl")[0]}


def advantages(case: Case, given: Given) -> Found:
    args, mask = case["args"], mask_of(given)
    name = {"compute_gae_advantage_return": "gae"}.get(case["func"], case["func"].removeprefix("adv_"))
    name = name.removesuffix("_vectorized")
    options = {word: args[word] for word in ("gamma", "lam") if word in args}
    inputs = [given["token_level_rewards"]]
    if name == "gae":
        inputs += [given["values"], mask, torch.zeros(len(mask))]
    else:
        inputs += [mask]
    if "index" in args:
        inputs.append(torch.tensor([ord(letter) for letter in args["index"]]))
    if name == "remax":
        inputs.append(given["reward_baselines"])
    if "norm_adv_by_std_in_grpo" in args:
        options["by_std"] = args["norm_adv_by_std_in_grpo"]
    found, returns = ESTIMATORS[name](*inputs, **options)
    if name in WHITENED:
        found = whiten(found, mask)
    # verl's baseline form returns what it whitened; ours the same, unwhitened, which its advantages show.
    return {"advantages": found, "returns": found if name.endswith("baseline") else returns}


def aggregated(losses: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """verl multiplies a rank's loss by the number of ranks, since it averages gradients over them; ours are
    summed."""
    loss = aggregate(
        losses,
        mask,
        mode,
        tokens=info.get("batch_num_tokens"),
        rows=info.get("global_batch_size"),
        scale=info.get("loss_scale_factor"),
    )
    return loss * (info.get("dp_size") or 1)


def agg_loss(case: Case, given: Given) -> Found:
    args = case["args"]
    return {"loss": aggregated(given["loss_mat"], mask_of(given), args["loss_agg_mode"], args)}


def logged(found: PolicyLoss, mask: Tensor) -> Found:
    return {
        "actor/pg_clipfrac": masked_mean(found.clipped.float(), mask),
        "actor/pg_clipfrac_lower": masked_mean(found.clipped_lower.float(), mask),
        "actor/ppo_kl": -masked_mean(found.log_ratio, mask),
    }


def policy_loss(case: Case, given: Given) -> Found:
    args, mask = case["args"], mask_of(given)
    name = case["func"].removeprefix("policy_loss_").replace("compute_policy_loss", "vanilla")
    loss, config = LOSSES[name], args.get("cfg", {})
    known = CLIP | TAU | {word: config[word] for word in CLIP if word in config}
    known["beta"] = config.get("policy_loss", {}).get("dro_beta")
    found = loss.compute(
        given["log_prob"],
        given["old_log_prob"],
        given["advantages"],
        given.get("rollout_is_weights"),
        mask,
        **{word: known[word] for word in loss.options},
    )
    per_row_only = name in ("geo_mean", "sapo")
    mode = loss.aggregate if per_row_only and loss.aggregate else args.get("loss_agg_mode", "token-mean")
    total = aggregated(found.losses, mask, mode, args.get("global_batch_info", {}))
    metrics = logged(found, mask)
    return {"loss": total, "pg_loss": total, **metrics} | {
        key.removeprefix("actor/"): value for key, value in metrics.items()
    }


def bypass_mode(case: Case, given: Given) -> Found:
    args, mask = case["args"], mask_of(given)
    names = ("loss_type", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    found, corrected = bypass(
        given["log_prob"],
        given["old_log_prob"],
        given["advantages"],
        mask,
        **CLIP,
        **{name: args[name] for name in names},
    )
    loss = aggregate(found.losses, corrected.mask, args["loss_agg_mode"])
    return {"loss": loss, **logged(found, corrected.mask), **corrected.metrics}


def squared_error(case: Case, given: Given) -> Found:
    args, mask = case["args"], mask_of(given)
    losses, clipped = value_loss(
        given["vpreds"], given["values"], given["returns"], mask, cliprange_value=args["cliprange_value"]
    )
    return {
        "vf_loss": aggregated(losses, mask, args["loss_agg_mode"], args),
        "vf_clipfrac": masked_mean(clipped.float(), mask),
    }


def entropy(case: Case, given: Given) -> Found:
    return {"entropy": entropy_of(given["logits"])}


def entropy_loss(case: Case, given: Given) -> Found:
    return {"loss": aggregate(entropy_of(given["logits"]), mask_of(given), case["args"]["loss_agg_mode"])}


def chosen(case: Case, given: Given) -> Found:
    return {"logprobs": log_probs_of(given["logits"], given["labels"])}


def correction(case: Case, given: Given) -> Found:
    options = {name: case["args"][name] for name in case["args"] if name.startswith("rollout_")}
    found = correct(given["old_log_prob"], given["rollout_log_prob"], mask_of(given), **options)
    return {"response_mask": found.mask, "rollout_is_weights": found.weights, **found.metrics}


def groups(case: Case, given: Given) -> Found:
    args = case["args"]
    return {
        "partitions": balanced_groups(
            args["seqlen_list"], args["k_partitions"], equal_size=args["equal_size"]
        )
    }


def micro_batches(case: Case, given: Given) -> Found:
    args = case["args"]
    found = balanced_micro_batches(
        args["seqlens"], args["max_token_len"], small_at_ends=args["use_dynamic_bsz_balance"]
    )
    return {"index": found}


def learning_rate(case: Case, given: Given) -> Found:
    args, kind = case["args"], case["func"].removeprefix("lr_")
    warmup, total = args["num_warmup_steps"], args.get("num_training_steps", args["n"] - 1) + 1
    rates = [
        lr_multiplier(
            step,
            total=total,
            kind=kind,
            warmup=warmup,
            min_ratio=args.get("min_lr_ratio", 0.0),
            stable_ratio=args.get("stable_ratio", 0.9),
        )
        for step in range(total)
    ]
    return {"warm-up": rates[:warmup], "after": rates[warmup + 1 :]}


def dapo_overlong(case: Case, given: Given) -> Found:
    args = case["args"]
    lengths = torch.tensor(args["lens"])
    terms = overlong(
        lengths, max_length=args["max_resp_len"], buffer=args["buffer_len"], factor=args["penalty_factor"]
    )
    mask = torch.arange(args["max_resp_len"]) < lengths.unsqueeze(1)
    return {
        "reward_tensor": place_on_last_token(args["base_score"] + terms, mask),
        "overlong_reward": terms.tolist(),
    }


CHECKS: dict[str, Callable[[Case, Given], Found]] = {
    "masked_sum": summed,
    "masked_mean": meaned,
    "masked_var": variance,
    "masked_whiten": whitened,
    "kl_penalty": penalty,
    "AdaptiveKLController": adaptive,
    "FixedKLController": fixed,
    "apply_kl_penalty": in_reward,
    "compute_rewards": rewards_of,
    "compute_gae_advantage_return": advantages,
    **dict.fromkeys((f"adv_{name}" for name in (*ESTIMATORS, "grpo_vectorized")), advantages),
    "agg_loss": agg_loss,
    "compute_policy_loss": policy_loss,
    **dict.fromkeys((f"policy_loss_{name}" for name in LOSSES), policy_loss),
    "policy_loss_bypass_mode": bypass_mode,
    "compute_value_loss": squared_error,
    "entropy_from_logits": entropy,
    "entropy_from_logits_with_chunking": entropy,
    "compute_entropy_loss": entropy_loss,
    "logprobs_from_logits": chosen,
    "rollout_correction": correction,
    "rollout_correction_raises": correction,
    "get_seqlen_balanced_partitions": groups,
    "rearrange_micro_batches": micro_batches,
    "lr_constant": learning_rate,
    "lr_cosine": learning_rate,
    "lr_wsd": learning_rate,
    "dapo_overlong": dapo_overlong,
}


# ---- comparing ---------------------------------------------------------------------------------------------

ALL = load_file(FOLDER / "golden.safetensors")
CASES: list[Case] = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["cases"]


def tensors(case: Case, kind: str) -> Given:
    return {name: ALL[f"{case['id']}/{kind}/{name}"] for name in case[kind]}


def compare(name: str, mine: Any, expected: Any) -> None:
    if isinstance(expected, list) and expected and isinstance(expected[0], list):
        assert mine == expected, name  # row numbers
        return
    mine = torch.as_tensor(mine).detach().double()
    expected = torch.as_tensor(expected).double()
    torch.testing.assert_close(mine, expected, **TOLERANCE, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_numbers_and_gradients_are_those_of_verl(case: Case) -> None:
    given = tensors(case, "in")
    for name in case["grad"]:
        given[name].requires_grad_(True)
    found = CHECKS[case["func"]](case, given)
    expected: Found = tensors(case, "out") | case["scalars"]
    for difference in adapted(case, given):
        expected = difference.turned(case, given, expected)
    assert expected, "nothing to compare"
    for name, value in expected.items():
        compare(name, found[name], value)
    if case["grad"]:
        out = next(found[name] for name in case["out"] if found[name].requires_grad)
        gradients = torch.autograd.grad(out.sum(), [given[name] for name in case["grad"]])
        for name, gradient in zip(case["grad"], gradients, strict=True):
            compare(f"gradient of {name}", gradient, ALL[f"{case['id']}/grad/{name}"])


def test_few_cases_differ_on_purpose() -> None:
    different = [case["id"] for case in CASES if adapted(case, tensors(case, "in"))]
    assert len(different) <= ADAPTED_AT_MOST, different


def test_every_difference_is_needed() -> None:
    used = {difference.why for case in CASES for difference in adapted(case, tensors(case, "in"))}
    assert used == {difference.why for difference in DIFFERENCES.values()} or "REIN_GOLDEN" in os.environ
