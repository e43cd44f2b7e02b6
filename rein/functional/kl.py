"""Estimators of KL(actor || reference) per token, the coefficient's controller, and what may restrain what.

x = log pi_actor, r = log pi_ref of the sampled token, z = r - x, in nats. Names and clamps as in verl
(core_algos.kl_penalty); k3_soft, off_policy and `off_policy_kl` are made for stored data, whose tokens the
actor did not sample. Values and gradients are finite for all finite log-probs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rein.functional.masked import LOG_RATIO_CLAMP, counted

K3_CAP = 10.0
SOFT_FROM = 2.6
WEIGHT_CAP = 2.0  # off_policy: of actor / behavior
UNSTORED = 2.0  # off_policy: nats that probability costs which moves to tokens the data never shows
FAR = 1e15  # nats; a logit masked with the lowest float is further away, and its square is infinite


def _gap(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).clamp(-FAR, FAR)


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """x - r (joschu.net/blog/kl-approx, k1): unbiased for samples of the actor, of either sign."""
    return _gap(log_probs, ref_log_probs)


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """|x - r|"""
    return _gap(log_probs, ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """(x - r)^2 / 2"""
    return 0.5 * _gap(log_probs, ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^z - z - 1, z clamped to +-20 and the value to +-10 (verl's low_var_kl): no gradient in a clamp."""
    z = (ref_log_probs - log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return (z.exp() - z - 1).clamp(-K3_CAP, K3_CAP)


def k3_soft(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^z - z - 1 up to z = 2.6, then its tangent: value and gradient stay finite and never vanish."""
    z = _gap(ref_log_probs, log_probs)
    bent = z.clamp(max=SOFT_FROM)
    slope = torch.tensor(SOFT_FROM, dtype=z.dtype).exp() - 1
    return bent.exp() - bent - 1 + slope.to(z.device) * (z - bent)


BASE_KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k3_soft": k3_soft,
}
KINDS = (*BASE_KINDS, *(f"{kind}+" for kind in BASE_KINDS))  # read from the sampled token alone
EXACT_KINDS = ("full", "full+")  # need the whole vocabulary: log_probs.exact_kl at each position
OFF_POLICY = "off_policy"  # needs behavior log-probs


def kl_penalty(
    log_probs: Tensor,  # [B, T]
    ref_log_probs: Tensor,  # [B, T]
    kind: str,
    *,
    exact: Tensor | None = None,  # [B, T]  KL(actor || reference) over the vocabulary; kinds full and full+
    behavior_log_probs: Tensor | None = None,  # [B, T]  kind off_policy
    mask: Tensor | None = None,  # [B, T]  0 where it is False
) -> Tensor:
    """The estimator called `kind`, [B, T]; `kind+` has its value and the gradient of k2 (as in verl).

    `full` is the sum over the vocabulary, which the caller made with log_probs.exact_kl; `off_policy` is
    off_policy_kl_loss. Raises ValueError for an unknown kind, for `full` without `exact` and for
    `off_policy` without behavior_log_probs.
    """
    if kind == OFF_POLICY:
        if behavior_log_probs is None:
            raise ValueError(f"kl_penalty: kind {kind!r} needs `behavior_log_probs`")
        return off_policy_kl_loss(log_probs, ref_log_probs, behavior_log_probs, mask=mask)
    log_probs, ref_log_probs = counted(mask, log_probs, ref_log_probs)
    base = kind.removesuffix("+")
    if base == "full":
        if exact is None:
            raise ValueError(f"kl_penalty: kind {kind!r} needs `exact`, the KL over the whole vocabulary")
        (value,) = counted(mask, exact)
    elif base in BASE_KINDS:
        value = BASE_KINDS[base](log_probs, ref_log_probs)
    else:
        raise ValueError(
            f"kl_penalty: kind {kind!r} is unknown; known: {', '.join((*KINDS, *EXACT_KINDS, OFF_POLICY))}"
        )
    if not kind.endswith("+"):
        return value
    carrier = k2(log_probs, ref_log_probs)
    return carrier - carrier.detach() + value.detach()


def off_policy_kl(
    log_probs: Tensor,  # [B, T]  actor
    ref_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]  who sampled the tokens
    *,
    cap: float | None = None,
    mask: Tensor | None = None,  # [B, T]  0 where it is False
) -> Tensor:
    """(ref / mu) (w log w - w + 1) with w = actor / ref, per token, [B, T]: never negative.

    It is (actor / mu) k3 (joschu.net/blog/kl-approx), k3 weighted for tokens that mu sampled.
    Under tokens of the behavior policy mu its expectation at a state is KL(actor || ref). Log-ratios are
    clamped at 20; `cap` bounds the value for a lighter tail (and a bias).
    """
    log_probs, ref_log_probs, behavior_log_probs = counted(mask, log_probs, ref_log_probs, behavior_log_probs)
    log_w = (log_probs - ref_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    log_c = (ref_log_probs - behavior_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    # expm1 keeps the bracket exact near w = 1, where its terms cancel.
    bracket = (log_w.exp() * log_w - torch.expm1(log_w)).clamp(min=0)
    value = log_c.exp() * bracket
    return value if cap is None else value.clamp(max=cap)


def off_policy_kl_loss(
    log_probs: Tensor,  # [B, T]  actor
    ref_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]  who sampled the tokens
    *,
    mask: Tensor | None = None,  # [B, T]  0 where it is False
) -> Tensor:
    """The value of off_policy_kl with the gradient min(pi / mu, 2) (log(pi / ref) - 2) of log pi, [B, T].

    Over tokens of mu, E[(pi / mu) log(pi / ref) grad log pi] is the gradient of KL(actor || ref) at a state.
    k3 and k2 on the same tokens miss the weight pi / mu: they hold the actor to every stored token that the
    reference takes, even where it has dropped the token for good. The constant 2 changes no expectation
    where mu can produce every token; where it cannot, it is what leaving the stored tokens costs, for no
    data show what follows there (a baseline below the mean, as in arXiv:2506.20520).
    """
    log_probs, ref_log_probs, behavior_log_probs = counted(mask, log_probs, ref_log_probs, behavior_log_probs)
    with torch.no_grad():
        weight = (log_probs - behavior_log_probs).clamp(max=math.log(WEIGHT_CAP)).exp()
        pull = weight * (_gap(log_probs, ref_log_probs) - UNSTORED)
        value = off_policy_kl(log_probs, ref_log_probs, behavior_log_probs)
    return value + pull * (log_probs - log_probs.detach())


def adaptive_kl_coef(kl_coef: float, kl: float, *, rows: int, target_kl: float, horizon: float) -> float:
    """beta * clip(1 + clip(KL / target - 1, +-0.2) rows / horizon, 0.5, 2): arXiv:1909.08593, 2.2.

    `rows` were trained on since the last call. A reading that is NaN says nothing and moves nothing.
    """
    if math.isnan(kl):
        return kl_coef
    error = min(max(kl / target_kl - 1, -0.2), 0.2)
    return kl_coef * min(max(1 + error * rows / horizon, 0.5), 2.0)


def moving_average_kl(average: float | None, kl: float, *, rows: int, horizon: float) -> float | None:
    """a <- d a + (1 - d) KL with d = (1 - 1 / horizon)^rows; the first reading is the average.

    The controller `moving_average` is adaptive_kl_coef on this instead of the last reading. `average` is None
    before the first reading; a reading that is not finite says nothing and moves nothing.
    """
    if not math.isfinite(kl):
        return average
    if average is None:
        return kl
    kept = max(1 - 1 / horizon, 0.0) ** rows
    return kept * average + (1 - kept) * kl
