"""Tensors that may be cut over ranks along their first dimension, as FSDP2 cuts parameters: whole, and parts.

What asks for a whole is asked by every rank. Knows no files and no models.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

M = TypeVar("M", bound=nn.Module)


def is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor; all of one that is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every rank has, cut as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    cut = distribute_tensor(
        tensor.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    return cut.to(like.device)  # offloaded parts wait on the CPU


@torch.no_grad()
def norm(tensors: Sequence[Tensor]) -> float:
    """The L2 norm of all together."""
    cut = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if not cut:
        return torch.stack([tensor.norm() for tensor in tensors]).norm().item() if tensors else 0.0
    squares = torch.stack([tensor.to_local().double().square().sum() for tensor in cut]).sum()
    dist.all_reduce(squares, group=cut[0].device_mesh.get_group())
    return math.sqrt(squares.item())


@torch.no_grad()
def frozen_copy(module: M) -> M:
    """A copy with whole parameters that no longer change."""
    found = copy.deepcopy(module)
    for part in found.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(whole(parameter).clone(), requires_grad=False))
    return found
