"""Advantage estimators: token-level rewards and values in, advantages and returns out.

B rows by T right-padded positions; masks are True where a token counts. Positions that do not count (padding,
tool tokens) hand the state through untouched. Whitening is the caller's choice. Knows nothing of models or
recipes.
"""

import torch
from torch import Tensor


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


ESTIMATORS = {"gae": gae}
