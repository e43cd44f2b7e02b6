"""What the C library does with memory that tensors have given back, and how much the process has held."""

import ctypes
import gc
import os
import platform
import resource
import sys

MOST = 2**31 - 1  # of mallopt's int
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
GROWTH = 2**26  # bytes that the heap grows by at least
LARGE = 2**17  # bytes
KERNELS = 320  # matrix products that stay compiled


def keep_few_kernels() -> None:
    """Let oneDNN keep few of the products that it compiles, not 1,024; called before the first one.

    It compiles one for each shape, and a micro-batch has hardly ever as many tokens as one before: what is
    kept is of use within an update, and grows with the run (0.6 MiB each on an AMD EPYC). With 64 an update
    of a 135M model took 6 % longer in `exact` and 12 % in `fast`, with 160 2 and 9, with 320 none that shows.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next tensors; whether the C library knows how (glibc does).

    By default glibc maps every large tensor anew and gives it back at once, and the kernel zeroes each of its
    pages on first touch, in every layer of every micro-batch. Below the peak, memory is rarely given back,
    and the peak can grow by the holes between tensors (benchmarks/shared_trunk.py).
    """
    return _told({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: MOST, M_TOP_PAD: GROWTH})


def give_back_freed_memory() -> bool:
    """Let every large tensor's memory go back when it is freed; whether the C library knows how.

    Where weights come and go between tensors that stay, as under FSDP2, a heap grows by the holes they leave.
    glibc, left alone, raises its limit of what is large.
    """
    return _told({M_MMAP_MAX: 2**16, M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: 2**17, M_TOP_PAD: 2**17})


def _told(settings: dict[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in settings.items())


def give_back_now() -> bool:
    """Give back what is free at this moment, wherever in the heap it lies; whether the C library knows how.

    For changes of work: what one kind leaves has other sizes than the next one's tensors, which find no room
    in it, so that the peaks of both would add up.
    """
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).malloc_trim(0))


def free_models() -> None:
    """Free the models that nothing uses any more.

    A module and what stands in its forward's place refer to each other, and a large model has too few objects
    for Python to look for such soon.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def peak_resident_gb() -> float:
    """The most memory that this process has held, in GiB."""
    unit = 1 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
