"""Freed memory is kept: the second pass over large tensors touches no new page. Unused models are freed."""

import platform
import subprocess
import sys
import weakref

import pytest

from rein.models.actor import load_actor
from rein.runtime.memory import free_models

COUNTS = """
import resource
import torch
from rein.runtime.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        x = torch.ones(4_000_000)
        x = x * x
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
first = faults()
kept = keep_freed_memory()
faults()
print(first, kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_kept_memory_is_not_faulted_in_again() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True)
    first, kept, then = done.stdout.split()
    assert kept == "True"
    assert int(first) > 10_000  # 20 rounds of two tensors of 16 MB, 4 kB a page
    assert int(then) < 100


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_a_model_that_nothing_uses_is_freed(tiny_lm: str, precision: str) -> None:
    actor = load_actor(tiny_lm, precision=precision)
    weights = [weakref.ref(parameter) for parameter in actor.model.parameters()]
    del actor
    free_models()
    assert not any(weight() is not None for weight in weights)
