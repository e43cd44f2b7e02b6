"""verl 0.9.1 on a CPU: a platform for its plugin registry, and a critic loader that takes sdpa.

Imported before the rest of verl. Of verl itself nothing else is replaced: `load_valuehead_model` asks for
flash_attention_2 (CUDA), here it is the same class with sdpa.
"""

# ruff: noqa: E402  the variables come before the imports

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

os.environ |= {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": str(29500 + os.getpid() % 2000), "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip

import torch
import torch.distributed

torch.distributed.init_process_group("gloo", rank=0, world_size=1)

import verl.utils.model
from transformers import AutoModelForTokenClassification
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def zero(*_: Any) -> int:
    return 0


class Device:
    """In place of torch.cuda."""

    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(zero)
    empty_cache = synchronize = set_device = reset_peak_memory_stats = staticmethod(zero)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def is_available(self) -> bool:
        return False

    def current_device(self) -> str:
        return "cpu"

    def get_device_name(self, *_: Any) -> str:
        return "cpu"


@PlatformRegistry.register(platform="cpu")
class Platform(PlatformBase):
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "nvidia")
    device_module = property(lambda self: Device())

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None: ...

    def synchronize(self, index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message: str) -> AbstractContextManager[None]:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def load_valuehead_model(
    local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
    )


verl.utils.model.load_valuehead_model = load_valuehead_model
