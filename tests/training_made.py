"""A small recipe with its learner and experience, as the training stage puts them together."""

from typing import Any

import numpy as np
import torch

from rein.config.recipe import Recipe
from rein.data.mixing import Mixing
from rein.experience import ExperienceMaker
from rein.learner import Learner
from rein.models.actor import Actor, load_actor
from rein.models.critic import Critic, load_critic
from rein.models.reference import Reference
from rein.runtime.single import SingleMesh
from rein.types import Experience, Floats, Trajectory

ROWS = 12
IMITATION = {
    "actor": {"policy_loss": {"loss_mode": "nll"}, "use_kl_loss": False},
    "algorithm": {"adv_estimator": None, "rollout_correction": {"rollout_is": None}},
}


def recipe(rows: int = ROWS, **sections: dict[str, Any]) -> Recipe:
    """One batch of `rows` rows in one mini-batch; sections override."""
    base: dict[str, dict[str, Any]] = {
        "data": {"train_batch_size": rows, "max_response_length": 9},
        "actor": {"ppo_mini_batch_size": rows, "ppo_epochs": 1, "optim": {"lr": 1e-2}},
        "critic": {"optim": {"lr": 1e-2}},
        "guards": {"preset": "off"},
    }
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    return Recipe.model_validate(merged)


def moved(model: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    """As training would: weights a little elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(size * noise)


def references(rows: list[Trajectory], seed: int = 0) -> dict[str, Floats]:
    """Numbers in the place of what a reference says."""
    draw = np.random.default_rng(seed)
    return {row.key: -3 * draw.random(len(row.response_ids)).astype(np.float32) for row in rows}


def models(path: str, dtype: str = "float32", **options: Any) -> tuple[Actor, Critic]:
    """An actor, and a critic whose values are not all 0."""
    actor, critic = load_actor(path, dtype=dtype, **options), load_critic(path, dtype=dtype, **options)
    weight = critic.model.score.weight
    drawn = torch.empty(weight.shape, dtype=weight.dtype).normal_(generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight.copy_(drawn)
    return actor, critic


def learner_of(
    some: Recipe,
    actor: Actor,
    critic: Critic | None,
    *,
    kl: float = 0.05,
    steps: int = 10,
    demonstrations: Mixing | None = None,
    start: Reference | None = None,
) -> Learner:
    return Learner(
        some, actor, critic, SingleMesh(),
        kl_coef_in_loss=kl, kl_coef_in_reward=kl, actor_steps=steps, critic_steps=steps,
        demonstrations=demonstrations, reference=start,
    )  # fmt: skip


def experience_of(
    some: Recipe,
    actor: Actor,
    critic: Critic | None,
    rows: list[Trajectory],
    *,
    reference: bool = True,
    corrected: bool = True,
    kl: float = 0.05,
    start: Reference | None = None,
) -> Experience:
    refs = references(rows) if reference else None
    maker = ExperienceMaker(some, actor, critic, refs, corrected=corrected, reference=start)
    return maker.make(rows, kl)


def gradients_of(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """Taken and cleared, so that the next backward starts anew."""
    found = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.append(parameter.grad.clone())
            parameter.grad = None
    return found
