"""FSDP2 from outside: a model's parameters, gradients and moments are cut over ranks, block by block.

Takes a module whose forward is the whole pass and its blocks; knows no recipe. Gradients are summed over
ranks, in float32 or wider, and never divided: losses already are sums over the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)


def shard(
    whole: nn.Module,
    blocks: Sequence[nn.Module],
    ranks: int,
    *,
    param_dtype: torch.dtype | None = None,  # of a block's computing; None: the parameters'
    prefetch: int = 1,  # blocks gathered ahead of the one that computes
    offload: bool = False,  # what is cut waits in the CPU's memory
) -> None:
    """Cut `whole` over the ranks in place; every block is gathered when it computes and let go after."""
    mesh = init_device_mesh(next(whole.parameters()).device.type, (ranks,))
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    reduce = None if _dtype(whole) == torch.float64 else torch.float32
    plain = MixedPrecisionPolicy(reduce_dtype=reduce)
    mixed = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce)
    # Also the root lets its parameters go after a pass: between passes a module's are always the cut ones.
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed, offload_policy=policy, reshard_after_forward=True)
    fully_shard(whole, mesh=mesh, mp_policy=plain, offload_policy=policy, reshard_after_forward=True)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True)
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        ahead: list[FSDPModule] = [b for b in blocks[i + 1 : i + 1 + prefetch] if isinstance(b, FSDPModule)]
        if ahead:
            block.set_modules_to_forward_prefetch(ahead)
    assert isinstance(whole, FSDPModule)
    whole._get_fsdp_state()._lazy_init()  # or a block that is called first, in generation, becomes the root


def _dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


@contextmanager
def gathered(whole: nn.Module) -> Iterator[None]:
    """Inside, modules hold their whole parameters on every rank, and passes exchange nothing."""
    parts = [module for module in whole.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
