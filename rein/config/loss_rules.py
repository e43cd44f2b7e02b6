"""Rules that hold for the policy loss and the off-policy correction of a recipe.

A broken rule is the key to blame and what to say of it.
"""

from __future__ import annotations

from typing import NamedTuple

from rein.config.methods import ESTIMATOR, ONLY_PER_ROW, OWN_DENOMINATOR, READ_NO_ADVANTAGES
from rein.config.recipe import Recipe, RewardManager
from rein.functional.presets import rejection_bounds

_READ_BY = {  # keys that one loss alone reads
    **dict.fromkeys(("tau_pos", "tau_neg"), ("sapo",)),
    "dro_beta": ("dro",),
    "topr_ratio_max": ("topr",),
    **dict.fromkeys(("awr_beta", "awr_weight_max"), ("awr",)),
    "m2po_threshold": ("m2po",),
    "sppo_eta": ("sppo",),
    **dict.fromkeys(("dpo_beta", "dpo_nll_coef", "dpo_label_smoothing"), ("dpo",)),
}


class Broken(NamedTuple):
    """A rule that a recipe breaks: the key to blame, what is wrong and what to do."""

    key: str
    message: str


def of_loss(recipe: Recipe) -> list[Broken]:
    actor, estimator = recipe.actor, recipe.algorithm.adv_estimator
    loss, found = actor.policy_loss.loss_mode, list[Broken]()
    if estimator is None and loss not in READ_NO_ADVANTAGES:
        found.append(Broken(ESTIMATOR, f"null, but {loss} weighs tokens by advantages; write gae or another"))
    if loss == "dro" and actor.policy_loss.dro_beta is None:
        found.append(Broken("actor.policy_loss.dro_beta", "dro needs it; write a number above 0"))
    if loss in ONLY_PER_ROW and actor.loss_agg_mode != "seq-mean-token-mean":
        found.append(
            Broken(
                "actor.loss_agg_mode",
                f"{actor.loss_agg_mode}, but {loss} gives one loss per response; write seq-mean-token-mean",
            )
        )
    for name, value in actor.policy_loss:
        default = type(actor.policy_loss).model_fields[name].default
        if name in _READ_BY and value != default and loss not in _READ_BY[name]:
            readers = " or ".join(_READ_BY[name])
            found.append(
                Broken(
                    f"actor.policy_loss.{name}", f"only {readers} reads it, and the loss is {loss}; remove it"
                )
            )
    if estimator is None and recipe.algorithm.use_kl_in_reward:
        found.append(
            Broken(
                "algorithm.use_kl_in_reward",
                f"{loss} reads no reward; write actor.use_kl_loss=true, or false",
            )
        )
    if estimator is None and recipe.reward_manager != RewardManager():
        found.append(Broken("reward_manager", f"{loss} reads no shaped reward; remove these keys"))
    if loss == "dpo" and estimator is not None:
        found.append(Broken(ESTIMATOR, f"{estimator}, but dpo reads no advantages; write null"))
    if loss == "dpo":
        if actor.use_kl_loss or actor.entropy_coeff:
            key = "actor.use_kl_loss" if actor.use_kl_loss else "actor.entropy_coeff"
            found.append(Broken(key, "dpo holds to the reference by itself; write false or 0"))
        for key, size in (
            ("actor.ppo_mini_batch_size", actor.ppo_mini_batch_size),
            ("data.train_batch_size", recipe.data.train_batch_size),
        ):
            if size % 2:
                found.append(Broken(key, f"{size}, but dpo takes rows in pairs; write an even size"))
        if actor.policy_loss.opsm_threshold is not None:
            found.append(Broken("actor.policy_loss.opsm_threshold", "dpo has no advantages; remove it"))
        if not actor.use_dynamic_bsz:
            found.append(
                Broken("actor.use_dynamic_bsz", "dpo cuts micro-batches by tokens, whole pairs; write true")
            )
    return found


def of_correction(recipe: Recipe) -> list[Broken]:
    algorithm, section = recipe.algorithm, "algorithm.rollout_correction"
    correction, found = algorithm.rollout_correction, list[Broken]()
    if correction.rollout_rs is not None:
        try:
            rejection_bounds(correction.rollout_rs, correction.rollout_rs_threshold)
        except ValueError as error:
            found.append(Broken(f"{section}.rollout_rs", f"{error}; correct it"))
    elif correction.rollout_rs_threshold is not None:
        found.append(Broken(f"{section}.rollout_rs_threshold", "needs rollout_rs; write the rules too"))
    loss = recipe.actor.policy_loss.loss_mode
    if loss in OWN_DENOMINATOR and correction.rollout_is is not None:
        found.append(
            Broken(f"{section}.rollout_is", f"{loss} stands against its own denominator already; write null")
        )
    if loss == "dpo" and correction.rollout_rs is not None:
        found.append(Broken(f"{section}.rollout_rs", "dpo rejects no tokens; remove it"))
    if algorithm.adv_estimator == "vtrace" and correction.rollout_is is None and not correction.bypass_mode:
        found.append(
            Broken(ESTIMATOR, "vtrace leaves the last weight to the loss; write rollout_is=auto or token")
        )
    if correction.loss_type != "ppo_clip" and not correction.bypass_mode:
        found.append(
            Broken(f"{section}.loss_type", "is read in bypass mode only; write bypass_mode=true too")
        )
    if correction.bypass_mode:
        if recipe.actor.policy_loss.opsm_threshold is not None:
            found.append(
                Broken(
                    "actor.policy_loss.opsm_threshold",
                    "is not read in bypass mode; write rollout_rs, or remove it",
                )
            )
        if loss not in ("ppo_clip", "vanilla"):
            found.append(
                Broken(
                    f"{section}.bypass_mode", f"{loss} has a denominator of its own; write false, or ppo_clip"
                )
            )
        if correction.rollout_is_batch_normalize:
            found.append(
                Broken(
                    f"{section}.rollout_is_batch_normalize",
                    "bypass mode makes weights anew in each micro-batch, without a batch mean; write false",
                )
            )
    if algorithm.adv_estimator == "vtrace" and correction.rollout_is in ("sequence", "geometric"):
        found.append(
            Broken(f"{section}.rollout_is", "V-trace's own weights are of tokens; write token or auto")
        )
    return found
