"""Freed memory is kept: the second pass over large tensors touches no new page. Unused models are freed."""

import os
import platform
import subprocess
import sys
import weakref

import pytest

from rein.models.actor import load_actor
from rein.runtime.memory import KERNELS, free_models, keep_few_kernels

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


HOLES = """
import sys
from pathlib import Path
import torch
from rein.runtime import memory

getattr(memory, sys.argv[1])()
kept = []
for i in range(40):  # ever larger ones come and go between small ones that stay
    large = torch.ones(2**20 * (4 + i % 8))
    kept.append(torch.ones(2**12))
    del large
lines = Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_that_is_given_back_leaves_no_holes() -> None:
    kept, given = (
        int(
            subprocess.run(
                [sys.executable, "-c", HOLES, way], capture_output=True, text=True, check=True
            ).stdout
        )
        for way in ("keep_freed_memory", "give_back_freed_memory")
    )
    assert kept - given > 20 * 2**10  # kB: at least the largest, 44 MB, is held on to


FREE = """
from pathlib import Path

import torch

from rein.runtime.memory import give_back_now, keep_freed_memory

keep_freed_memory()
large = [torch.ones(2**20) for _ in range(20)]
kept = torch.ones(2**20)
del large
resident = lambda: int(next(s for s in open("/proc/self/status") if s.startswith("VmRSS")).split()[1])
before = resident()
give_back_now()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_is_free_below_what_stays_is_given_back_when_asked() -> None:
    done = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 60 * 2**10  # kB, of 80 MB that were free


def test_a_number_of_kernels_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "7")
    keep_few_kernels()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    keep_few_kernels()
    assert os.environ[name] == str(KERNELS)


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
