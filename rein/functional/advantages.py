"""Advantage estimators: token-level rewards in, advantages and returns out; group_advantages.py has those
without a critic.

B rows by T right-padded positions; masks are True where a token counts. Positions that do not count (padding,
tool tokens) hand the state through untouched. Whitening is the caller's choice (WHITENED). Knows nothing of
models or recipes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rein.functional.group_advantages import grpo, opo, reinforce_plus_plus_baseline, rloo, win_rate
from rein.functional.masked import LOG_RATIO_CLAMP, counted, masked_sum


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]  V(s_t), read before token t is chosen
    response_mask: Tensor,  # [B, T]  bool
    bootstrap_values: Tensor,  # [B]  V after the last token; 0 where the row is terminal
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) -> advantages, returns = A + V.

    delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}
    """
    advantages = torch.zeros_like(values)
    next_value, next_advantage = bootstrap_values, torch.zeros_like(bootstrap_values)
    for t in reversed(range(values.shape[1])):
        counts = response_mask[:, t]
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(counts, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(counts, values[:, t], next_value)
        advantages[:, t] = next_advantage
    advantages = advantages.where(response_mask, 0)
    return advantages, (advantages + values).where(response_mask, 0)


@torch.no_grad()
def vtrace(
    token_level_rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    bootstrap_values: Tensor,  # [B]
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    *,
    gamma: float,
    lam: float,
    threshold: float,  # rho_bar: the bound of the loss's weights
) -> tuple[Tensor, Tensor]:
    """V-trace (arXiv:1802.01561, eq. 1, with lam as in its remark 2) -> advantages, critic targets v.

    delta_t = min(rho_t, rho_bar) (r_t + gamma V_{t+1} - V_t)    c_t = lam min(rho_t, 1), rho = old / behavior
    v_t - V_t = delta_t + gamma c_t (v_{t+1} - V_{t+1})          A_t = r_t + gamma v_{t+1} - V_t

    A_t is without its own rho: the loss multiplies by it once. Where every rho is 1, v is that of GAE.
    """
    old_log_probs, behavior_log_probs = counted(response_mask, old_log_probs, behavior_log_probs)
    rho = (old_log_probs - behavior_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    delta_weights, trace = rho.clamp(max=threshold), lam * rho.clamp(max=1)
    advantages, excess = torch.zeros_like(values), torch.zeros_like(values)
    next_value, next_excess = bootstrap_values, torch.zeros_like(bootstrap_values)
    for t in reversed(range(values.shape[1])):
        counts, value, reward = response_mask[:, t], values[:, t], token_level_rewards[:, t]
        advantages[:, t] = reward + gamma * (next_value + next_excess) - value
        delta = delta_weights[:, t] * (reward + gamma * next_value - value)
        excess[:, t] = delta + gamma * trace[:, t] * next_excess
        next_excess = torch.where(counts, excess[:, t], next_excess)
        next_value = torch.where(counts, value, next_value)
    return advantages.where(response_mask, 0), (excess + values).where(response_mask, 0)


@torch.no_grad()
def trace_kept(
    old_log_probs: Tensor,  # [B, T]
    behavior_log_probs: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]
) -> float:
    """Mean over rows of prod_t min(1, old / behavior): how much of the end V-trace still sees at the start.

    1 for data of the actor itself. Rows without a counted token are left out; 0 where there is none else.
    """
    old, behavior = counted(response_mask, old_log_probs.double(), behavior_log_probs.double())
    kept = masked_sum((old - behavior).clamp(max=0), response_mask, 1).exp()
    rows = response_mask.any(1)
    return kept[rows].mean().item() if rows.any() else 0.0


@torch.no_grad()
def monte_carlo(
    token_level_rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    bootstrap_values: Tensor,  # [B]
    *,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """A_t = G_t - V_t, returns G_t = r_t + gamma G_{t+1}: no bias from the critic, the most variance.

    Sutton and Barto 2018, section 13.4; the same as GAE with lam = 1.
    """
    return gae(token_level_rewards, values, response_mask, bootstrap_values, gamma=gamma, lam=1.0)


@torch.no_grad()
def discounted_returns(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    *,
    gamma: float,
) -> Tensor:
    """Monte-Carlo returns G_t = r_t + gamma G_{t+1}, [B, T]: what a critic is fitted to before PPO."""
    zeros = torch.zeros_like(token_level_rewards)
    advantages, _ = gae(token_level_rewards, zeros, response_mask, zeros[:, 0], gamma=gamma, lam=1.0)
    return advantages


@torch.no_grad()
def reinforce_plus_plus(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    *,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """A = G, to be whitened over the batch by the caller (arXiv:2501.03262)."""
    found = discounted_returns(token_level_rewards, response_mask, gamma=gamma)
    return found, found


@torch.no_grad()
def remax(
    token_level_rewards: Tensor,  # [B, T]
    response_mask: Tensor,  # [B, T]  bool
    baseline_scores: Tensor,  # [B]  the reward of the prompt's greedy answer
) -> tuple[Tensor, Tensor]:
    """A_t = G_t - b, G undiscounted, b the greedy answer's reward (arXiv:2310.10505)."""
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return (returns - baseline_scores.unsqueeze(1)).where(response_mask, 0), returns


ESTIMATORS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gae": gae,
    "vtrace": vtrace,
    "monte_carlo": monte_carlo,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "win_rate": win_rate,
}
_CRITIC = ("token_level_rewards", "values", "response_mask", "bootstrap_values")
_GROUP = ("token_level_rewards", "response_mask", "groups")
INPUTS: dict[str, tuple[str, ...]] = {
    "gae": _CRITIC,
    "vtrace": (*_CRITIC, "old_log_probs", "behavior_log_probs"),
    "monte_carlo": _CRITIC,
    "grpo": _GROUP,
    "rloo": _GROUP,
    "reinforce_plus_plus": ("token_level_rewards", "response_mask"),
    "reinforce_plus_plus_baseline": _GROUP,
    "remax": ("token_level_rewards", "response_mask", "baseline_scores"),
    "opo": _GROUP,
    "win_rate": _GROUP,
}
"""The tensors each estimator takes, in order: what a batch must have for it."""
WHITENED = frozenset(("gae", "vtrace", "monte_carlo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"))
"""Those whose advantages the caller whitens over the whole batch; the others are scaled as they are."""
