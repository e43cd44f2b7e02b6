"""AdamW with its schedule and gradient clip: one optimizer step at a time, applied or discarded.

The schedule counts every step asked for, discarded ones too. State is plain tensors and JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rein.config.recipe import Optim
from rein.errors import CheckpointError
from rein.functional.schedules import lr_multiplier


class Optimizer:
    """Holds the trainable parameters of one model."""

    def __init__(self, model: nn.Module, optim: Optim, *, grad_clip: float, total_steps: int) -> None:
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        self.optim, self.grad_clip, self.total_steps = optim, grad_clip, max(total_steps, 1)
        self.adam = torch.optim.AdamW(
            self.parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.step = 0
        self.softened = 1.0  # times the rate

    @property
    def lr(self) -> float:
        """The rate of the step that comes next."""
        warmup = self.optim.lr_warmup_steps
        if warmup < 0:
            warmup = int(self.optim.lr_warmup_steps_ratio * self.total_steps)
        return (
            self.softened
            * self.optim.lr
            * lr_multiplier(
                self.step,
                total=self.total_steps,
                kind=self.optim.lr_scheduler_type,
                warmup=warmup,
                min_ratio=self.optim.min_lr_ratio,
            )
        )

    @torch.no_grad()
    def grad_norm(self) -> float:
        """L2 norm of all gradients, before clipping; weights and gradients untouched."""
        norms = [p.grad.norm() for p in self.parameters if p.grad is not None]
        return torch.stack(norms).norm().item() if norms else 0.0

    def apply(self, grad_norm: float) -> None:
        """Clip to grad_clip and step. `grad_norm` is what grad_norm() gave for these gradients."""
        if grad_norm > self.grad_clip:
            factor = self.grad_clip / (grad_norm + 1e-6)
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)
        for group in self.adam.param_groups:
            group["lr"] = self.lr
        self.adam.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients; the schedule advances."""
        self.adam.zero_grad(set_to_none=True)
        self.step += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Trainable weights and moments by parameter name, and the counters."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named:
            tensors[f"weight/{name}"] = parameter.detach()
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors, {"step": self.step, "total_steps": self.total_steps}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Put state() back, all of it or an error: a missing part is never a fresh start."""
        with torch.no_grad():
            for name, parameter in self.named:
                if f"weight/{name}" not in tensors:
                    raise CheckpointError(
                        f"snapshot: weights of {name} are missing; resume from another snapshot"
                    )
                parameter.copy_(tensors[f"weight/{name}"])
        moments = ("step", "exp_avg", "exp_avg_sq")
        self.adam.state.clear()
        for name, parameter in self.named:
            found = {key: tensors[f"{key}/{name}"].clone() for key in moments if f"{key}/{name}" in tensors}
            if found and len(found) != len(moments):
                raise CheckpointError(
                    f"snapshot: optimizer state of {name} is incomplete; resume from another snapshot"
                )
            if found:
                self.adam.state[parameter] = found
        self.step = int(meta["step"])
