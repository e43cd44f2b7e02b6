"""AdamW with its schedule and gradient clip: one optimizer step at a time, applied or discarded.

The schedule counts every step asked for, discarded ones too. State is plain tensors and JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rein.config.recipe import Optim
from rein.errors import CheckpointError
from rein.functional.schedules import lr_multiplier
from rein.sharded import cut_like, norm

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's, of a weight that was moved


class Optimizer:
    """Holds the trainable parameters of one model."""

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        *,
        grad_clip: float,
        total_steps: int,
    ) -> None:
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
        return norm([p.grad for p in self.parameters if p.grad is not None])

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
        increment_version(self.parameters)  # fused AdamW does not, and `fast` casts again what has moved
        self.discard()

    def discard(self) -> None:
        """Drop the gradients; the schedule advances."""
        self.adam.zero_grad(set_to_none=True)
        self.step += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Trainable weights and moments by parameter name; the counters, and who has no moments yet."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named:
            tensors[f"weight/{name}"] = parameter.detach()
            for key, value in self.adam.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        still = [name for name, parameter in self.named if parameter not in self.adam.state]
        return tensors, {"step": self.step, "total_steps": self.total_steps, "still": still}

    def fault(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
        """Why restore() would not take this state: the first part that is missing or odd; else nothing."""
        if missing := [key for key in ("step", "still") if key not in meta]:
            return f"{missing[0]} is missing"
        still, left = set(meta["still"]), set(tensors)
        for name, parameter in self.named:
            wanted: dict[str, Tensor] = {f"weight/{name}": parameter}
            if name not in still:
                wanted |= {f"exp_avg/{name}": parameter, f"exp_avg_sq/{name}": parameter}
                wanted[f"step/{name}"] = torch.zeros((), dtype=torch.float32)
            for key, like in wanted.items():
                found = tensors.get(key)
                if found is None:
                    return f"{key} is missing"
                if (found.shape, found.dtype) != (like.shape, like.dtype):
                    return f"{key} is {_kind(found)}, not {_kind(like)}"
                left.discard(key)
        return f"{min(left)} belongs to no weight that is trained" if left else ""

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Put state() back, all of it or none: a missing part is never a fresh start.

        Gradients are dropped. Raises CheckpointError that names the part which does not fit.
        """
        if fault := self.fault(tensors, meta):
            raise CheckpointError(f"snapshot: {fault}; resume from another snapshot")
        self.adam.state.clear()
        with torch.no_grad():
            for name, parameter in self.named:
                parameter.copy_(cut_like(tensors[f"weight/{name}"], parameter))
                if name not in meta["still"]:
                    own = {key: tensors[f"{key}/{name}"].to(parameter.device, copy=True) for key in MOMENTS}
                    cut = {key: cut_like(own[key], parameter) for key in MOMENTS if key != "step"}
                    self.adam.state[parameter] = own | cut
        self.adam.zero_grad(set_to_none=True)
        self.step = int(meta["step"])


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
