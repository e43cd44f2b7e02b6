"""The GPU of a rank: the one with its number on its machine, which `cuda` means from then on."""

import os

import torch

from rein.errors import ConfigError


def take_own_gpu(ranks: int) -> None:
    """Before any tensor lies on a GPU. Raises ConfigError where this machine has fewer than its `ranks`."""
    there = torch.cuda.device_count()
    if there < ranks:
        raise ConfigError(f"nproc: {ranks} ranks need a GPU each, and {there} are here; write nproc={there}")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
