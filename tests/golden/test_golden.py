"""Numbers that verl 0.9.1 gave for the functions we have under other names: outputs, metrics and gradients.

The cases lie beside this file; `REIN_GOLDEN=<folder>` checks another set of the same form. Where our rule
is another one on purpose, `DIFFERENCES` says which and why, and the check of that name adapts.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rein.functional.advantages import gae
from rein.functional.kl import adaptive_kl_coef, kl_penalty
from rein.functional.log_probs import entropy_of, log_probs_of
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.ppo import ppo_clip
from rein.functional.losses.value import value_loss
from rein.functional.masked import masked_mean, masked_sum, masked_var, whiten
from rein.functional.off_policy import diagnostics, token_weights
from rein.functional.rewards import subtract_kl
from rein.functional.schedules import lr_multiplier

FOLDER = Path(os.environ.get("REIN_GOLDEN", Path(__file__).parent))
TOLERANCE = {"atol": 1e-6, "rtol": 1e-5}

DIFFERENCES = {
    "masked positions": "verl whitens them too; ours are 0, so only counted tokens are compared",
    "whitening": "verl's GAE whitens; ours leaves that to the caller and is whitened before it is compared",
    "ranks": "verl multiplies each rank's loss by their number, for it averages gradients; ours are summed",
    "scale only": "whitening that keeps the mean has no use here; its cases (shift_mean=false) are left out",
    "bounds": "ours keeps a coefficient within x0.5 to x2 per call; no case here comes near",
    "warm-up": "verl's first update has a rate of 0 and moves nothing; ours is one step ahead in warm-up",
    "cosine": "verl reaches its floor a step after the last update, ours at the last: `total` is one larger",
    "in reward": "verl averages the KL of rows, ours of tokens; the metric is left out, the rewards compare",
}

Found = dict[str, Any]


def tensors(case: dict[str, Any], kind: str) -> dict[str, Tensor]:
    return {name: ALL[f"{case['id']}/{kind}/{name}"] for name in case[kind]}


def summed(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    values, mask = given["values"], given["mask"].bool()
    return {"all": masked_sum(values, mask), "row": masked_sum(values, mask, -1)}


def meaned(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    values, mask = given["values"], given["mask"].bool()
    return {"all": masked_mean(values, mask), "row": masked_mean(values, mask, -1)}


def variance(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    values, mask = given["values"], given["mask"].bool()
    return {"unbiased": masked_var(values, mask), "biased": masked_var(values, mask, unbiased=False)}


def whitened(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    return {"out": whiten(given["values"], given["mask"].bool())}


def penalty(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    return {"kld": kl_penalty(given["logprob"], given["ref_logprob"], case["args"]["kl_penalty"])}


def adaptive(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args = case["args"]
    coef, values = args["init_kl_coef"], []
    for kl, rows in zip(args["current_kl"], args["n_steps"], strict=True):
        coef = adaptive_kl_coef(coef, kl, rows=rows, target_kl=args["target_kl"], horizon=args["horizon"])
        values.append(coef)
    return {"values": values}


def in_reward(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["response_mask"].bool()
    scores, old, ref = (given[name] for name in ("token_level_scores", "old_log_probs", "ref_log_prob"))
    coef = args["init_kl_coef"]
    rewards, kl = subtract_kl(scores, old, ref, mask, kl_coef=coef, kind=args["kl_penalty"])
    current = masked_mean(kl, mask, -1).mean().item()
    after = adaptive_kl_coef(
        coef, current, rows=len(kl), target_kl=args["target_kl"], horizon=args["horizon"]
    )
    return {"token_level_rewards": rewards, "actor/reward_kl_penalty_coeff": coef, "kl_coef_after": after}


def advantages(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["response_mask"].bool()
    rewards, values = given["token_level_rewards"], given["values"]
    found, returns = gae(rewards, values, mask, torch.zeros(len(mask)), gamma=args["gamma"], lam=args["lam"])
    return {"advantages": whiten(found, mask), "returns": returns}


def aggregated(losses: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    loss = aggregate(
        losses,
        mask,
        mode,
        tokens=info.get("batch_num_tokens"),
        rows=info.get("global_batch_size"),
        scale=info.get("loss_scale_factor"),
    )
    return loss * (info.get("dp_size") or 1)


def agg_loss(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["loss_mask"].bool()
    return {"loss": aggregated(given["loss_mat"], mask, args["loss_agg_mode"], args)}


def surrogate(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["response_mask"].bool()
    config = args.get("cfg", {})
    clip = args.get("cliprange", config.get("clip_ratio", 0.2))
    found = ppo_clip(
        given["log_prob"],
        given["old_log_prob"],
        given["advantages"],
        given.get("rollout_is_weights"),
        clip_ratio_low=config.get("clip_ratio_low", clip),
        clip_ratio_high=config.get("clip_ratio_high", clip),
        clip_ratio_c=args.get("clip_ratio_c", config.get("clip_ratio_c", 3.0)),
    )
    mode, info = args.get("loss_agg_mode", "token-mean"), args.get("global_batch_info", {})
    loss = aggregated(found.losses, mask, mode, info)
    metrics = {
        "pg_clipfrac": masked_mean(found.clipped.float(), mask),
        "pg_clipfrac_lower": masked_mean(found.clipped_lower.float(), mask),
        "ppo_kl": -masked_mean(found.log_ratio, mask),
    }
    return {
        "loss": loss,
        "pg_loss": loss,
        **metrics,
        **{f"actor/{name}": value for name, value in metrics.items()},
    }


def squared_error(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["response_mask"].bool()
    clip = args["cliprange_value"]
    losses, clipped = value_loss(given["vpreds"], given["values"], given["returns"], cliprange_value=clip)
    return {
        "vf_loss": aggregated(losses, mask, args["loss_agg_mode"], args),
        "vf_clipfrac": masked_mean(clipped.float(), mask),
    }


def entropy(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    return {"entropy": entropy_of(given["logits"])}


def entropy_loss(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    mask = given["response_mask"].bool()
    return {"loss": aggregate(entropy_of(given["logits"]), mask, case["args"]["loss_agg_mode"])}


def chosen(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    return {"logprobs": log_probs_of(given["logits"], given["labels"])}


def weights(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args, mask = case["args"], given["response_mask"].bool()
    old, behavior = given["old_log_prob"], given["rollout_log_prob"]
    threshold = args["rollout_is_threshold"]
    found: Found = {"rollout_is_weights": token_weights(old, behavior, mask, threshold=threshold)}
    said = diagnostics(old, behavior, mask, threshold=threshold)
    found["rollout_corr/kl"] = said["rollout_corr/kl"]
    found["rollout_corr/rollout_is_ratio_fraction_high"] = said["rollout_corr/rollout_is_ratio_fraction_high"]
    return found


def has_our_like(case: dict[str, Any]) -> bool:
    """Whether the case asks for something that exists here."""
    args = case["args"]
    if case["func"] == "rollout_correction":
        plain = args["rollout_rs"] is None and not args["rollout_is_batch_normalize"]
        return plain and args["rollout_is"] == "token" and isinstance(args["rollout_is_threshold"], float)
    return case["func"] in CHECKS and args.get("shift_mean", True)


def constant(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    args = case["args"]
    options = {"total": args["n"], "kind": "constant", "warmup": args["num_warmup_steps"], "min_ratio": 0.0}
    return {"lr": [0.0, *(lr_multiplier(step, **options) for step in range(args["n"] - 1))]}


def cosine(case: dict[str, Any], given: dict[str, Tensor]) -> Found:
    """verl's step s is our s - 1 in warm-up and our s after it; `zero_indexed_step=false` is one ahead."""
    args = case["args"]
    warmup, last = args["num_warmup_steps"], args["num_training_steps"]
    options = {"total": last + 1, "kind": "cosine", "warmup": warmup, "min_ratio": args["min_lr_ratio"]}
    rates = [0.0, *(lr_multiplier(step, **options) for step in range(warmup))]
    rates += [lr_multiplier(step, **options) for step in range(warmup + 1, last + 1)]
    return {"lr": rates if args["zero_indexed_step"] else rates[1:]}


CHECKS: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Found]] = {
    "masked_sum": summed,
    "masked_mean": meaned,
    "masked_var": variance,
    "masked_whiten": whitened,
    "kl_penalty": penalty,
    "AdaptiveKLController": adaptive,
    "apply_kl_penalty": in_reward,
    "compute_gae_advantage_return": advantages,
    "agg_loss": agg_loss,
    "policy_loss_vanilla": surrogate,
    "compute_policy_loss": surrogate,
    "compute_value_loss": squared_error,
    "entropy_from_logits": entropy,
    "entropy_from_logits_with_chunking": entropy,
    "compute_entropy_loss": entropy_loss,
    "logprobs_from_logits": chosen,
    "rollout_correction": weights,
    "lr_constant": constant,
    "lr_cosine": cosine,
}
# Compared on counted tokens alone: the difference "masked positions".
COUNTED_ONLY = {"masked_whiten": "mask", "compute_gae_advantage_return": "response_mask"}

ALL = load_file(FOLDER / "golden.safetensors")
CASES = [
    case
    for case in json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["cases"]
    if has_our_like(case)
]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_numbers_and_gradients_are_those_of_verl(case: dict[str, Any]) -> None:
    given = tensors(case, "in")
    for name in case["grad"]:
        given[name].requires_grad_(True)
    found = CHECKS[case["func"]](case, given)
    mask = given[COUNTED_ONLY[case["func"]]].bool() if case["func"] in COUNTED_ONLY else None
    for name, expected in tensors(case, "out").items():
        if name in found:
            mine = found[name].detach()
            if mask is not None:
                mine, expected = mine[mask], expected[mask]
            torch.testing.assert_close(mine, expected.to(mine.dtype), **TOLERANCE)
    for name, number in case["scalars"].items():
        if name in found:
            compare_numbers(found[name], number)
    compared = set(found) & (set(case["out"]) | set(case["scalars"]))
    assert compared, "nothing was compared"
    if case["grad"]:
        out = next(found[name] for name in case["out"] if found[name].requires_grad)
        gradients = torch.autograd.grad(out.sum(), [given[name] for name in case["grad"]])
        for name, gradient in zip(case["grad"], gradients, strict=True):
            torch.testing.assert_close(gradient, ALL[f"{case['id']}/grad/{name}"], **TOLERANCE)


def compare_numbers(mine: Any, expected: Any) -> None:
    """A number, or a list that may be shorter than verl's, which goes on past the last step."""
    if isinstance(expected, list):
        mine, expected = torch.tensor(mine), torch.tensor(expected[: len(mine)])
    torch.testing.assert_close(
        torch.as_tensor(mine, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        **TOLERANCE,
    )


def test_every_function_in_the_table_has_cases() -> None:
    missing = set(CHECKS) - {case["func"] for case in CASES}
    assert not missing or "REIN_GOLDEN" in os.environ
