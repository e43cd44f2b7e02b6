"""Two policies instead of three: the ratio's denominator is who wrote the data, and nothing is recomputed.

With `ppo_clip` the clip itself bounds the ratio, so no weight is applied on top; with `reinforce` the weights
are those of the actor as it is now, made anew at every step.
"""

from torch import Tensor

from rein.functional.losses.policy_gradient import gpg
from rein.functional.losses.ppo import ppo_clip
from rein.functional.losses.result import PolicyLoss
from rein.functional.off_policy import Corrected, correct
from rein.functional.presets import LOSS_TYPES


def bypass(
    log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    loss_type: str,  # an entry of presets.LOSS_TYPES
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[PolicyLoss, Corrected]:
    """verl's `bypass_mode`: losses over what rejection leaves, and the correction of log_probs / behavior.

    ppo_clip: losses/ppo.py with r = pi / mu.    reinforce: -sg(w) A log pi, w from pi / mu.
    Raises ValueError for an unknown loss_type.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type: {loss_type!r} is unknown; known: {', '.join(LOSS_TYPES)}")
    corrected = correct(
        log_probs.detach(),
        behavior_log_probs,
        mask,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    kept = corrected.mask
    if loss_type == "reinforce":
        return gpg(log_probs, behavior_log_probs, advantages, corrected.weights, kept), corrected
    found = ppo_clip(
        log_probs,
        behavior_log_probs,
        advantages,
        None,
        kept,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    return found, corrected
