"""The processes of a run on ranks: started beside this one, or all of them by torchrun; none outlives it.

This process is rank 0, so signals, output and exit code are those of the command. A rank that ends early ends
the run. `python -m rein.runtime.launch` is another rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from rein.errors import ConfigError, RankLost, ReinError
from rein.runtime import torchrun
from rein.runtime.ranks import Ranks, started

PATIENCE = timedelta(days=7)  # rank 0 may validate, read or write for long; who is gone is noticed at once
GRACE = 10.0  # seconds in which a rank ends by itself
PR_SET_PDEATHSIG = 1
HERE = "here"  # in the store: how many other ranks have started
LEADER = "REIN_LEADER"  # the variable that holds its process number
LOOPBACK = {"linux": "lo", "darwin": "lo0"}.get(sys.platform, "")
Others = list["subprocess.Popen[bytes]"]


class _NotThere(Exception):
    """A rank ended before all had met."""


@contextmanager
def launched(nproc: int, nnodes: int = 1) -> Iterator[None]:
    """Inside, this process leads nproc ranks. Raises RankLost where one of them ended.

    Under torchrun ranks are those that it started, and they stay until dismiss().
    Raises ConfigError where torchrun started other numbers, or is needed.
    """
    if started() or (nproc == nnodes == 1 and not torchrun.under_torchrun()):
        yield
    elif torchrun.under_torchrun():
        _compare(nproc, nnodes)
        with _lost([]):
            if not dist.is_initialized():
                meet()
            yield
    elif nnodes > 1:
        raise ConfigError(
            f"nnodes: {nnodes} machines need torchrun, called on each: torchrun --nnodes {nnodes} "
            f"--nproc-per-node {nproc} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m rein VERB RECIPE"
        )
    else:
        with _beside(nproc):
            yield


@contextmanager
def _beside(nproc: int) -> Iterator[None]:
    others: Others = []
    over = threading.Event()
    try:
        with _one_machine(), _lost(others):
            store = TCPStore("127.0.0.1", 0, nproc, is_master=True, wait_for_workers=False)
            others += [_start(rank, nproc, store.port) for rank in range(1, nproc)]
            threading.Thread(target=_watch, args=(others, over), daemon=True).start()
            _await(store, others)
            meet(store, 0, nproc)
            yield
            over.set()
            Ranks().tell(None)
            for other in others:
                other.wait(GRACE)
    finally:
        over.set()
        for other in others:
            other.kill()
            other.wait()
        _leave()


@contextmanager
def _one_machine() -> Iterator[None]:
    """Inside, ranks meet on the machine's own address: the network outside may come and go."""
    name = "GLOO_SOCKET_IFNAME"
    former = os.environ.get(name)
    if LOOPBACK:
        os.environ[name] = LOOPBACK
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = former


def _compare(nproc: int, nnodes: int) -> None:
    if nproc * nnodes != torchrun.started():
        raise ConfigError(
            f"nproc: {nproc} on {nnodes} machine(s), but torchrun started {torchrun.started()} processes; "
            "give both the same numbers"
        )


def _start(rank: int, nproc: int, port: int) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "MASTER_PORT": port}
    own = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rein.runtime.launch"],
        env=os.environ | own | {"PYTHONPATH": path, LEADER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is the leader's
    )


def _await(store: Store, others: Others) -> None:
    """Until all are there."""
    while store.add(HERE, 0) < len(others):
        if any(other.poll() is not None for other in others):
            raise _NotThere
        time.sleep(0.02)


def _watch(others: Others, over: threading.Event) -> None:
    """End this process where a rank is gone and it does not notice by itself: it waits for it in a call."""
    while not over.wait(0.5):
        if any(other.poll() is not None for other in others):
            if not over.wait(2 * GRACE):
                print(f"error: {_said(others)}", file=sys.stderr, flush=True)
                for other in others:
                    other.kill()
                os._exit(RankLost.exit_code)
            return


def meet(store: Store | None = None, rank: int = -1, ranks: int = -1) -> None:
    """Become a rank of the group of all, by what torchrun says or by a store."""
    # A tensor is exchanged by the backend of where it lies, and what is told by the CPU's.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=PATIENCE)


def _leave() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):  # of ranks that are gone
            dist.destroy_process_group()


@contextmanager
def _lost(others: Others) -> Iterator[None]:
    """What torch says of a rank that is gone becomes RankLost."""
    try:
        yield
    except (RuntimeError, ConnectionError, _NotThere) as error:
        if not is_of_ranks(error):
            raise
        end = time.monotonic() + GRACE
        while others and time.monotonic() < end and all(other.poll() is None for other in others):
            time.sleep(0.02)
        raise RankLost(_said(others)) from error


def _said(others: Others) -> str:
    codes = {rank: other.poll() for rank, other in enumerate(others, 1)}
    gone = ", ".join(f"rank {rank} ({_ended(code)})" for rank, code in codes.items() if code is not None)
    return f"{gone or 'a rank'} ended amid the run; the same command goes on from the newest snapshot, if any"


def is_of_ranks(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, ReinError | BrokenPipeError):
        return False
    words = ("Connection closed by peer", "Connection reset", "gloo", "NCCL", "Broken pipe", "TCPStore")
    kinds = isinstance(error, dist.DistError | ConnectionError | _NotThere)
    return kinds or any(word in str(error) for word in words)


def _ended(code: int) -> str:
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name


def dismiss() -> None:
    """Under torchrun, at the very end of rank 0's command: the others have nothing more to do."""
    if not dist.is_initialized():
        meet()
    Ranks().tell(None)
    _leave()


def follow() -> NoReturn:
    """Be another rank until rank 0 has nothing more to do; ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it too, saves, and says when to end
    leader = os.environ.get(LEADER)
    if leader is not None:
        with suppress(OSError, AttributeError):  # Linux alone knows
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(leader):
            os._exit(1)
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        if leader is None:
            meet()
        else:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = TCPStore(*address, int(ranks), is_master=False)
            store.add(HERE, 1)
            meet(store, int(rank), int(ranks))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Ranks().follow()
    except Exception as error:
        if not is_of_ranks(error):  # else another one has said what happened
            said = " ".join(str(error).split())
            print(f"rank {rank}: {type(error).__name__}: {said}", file=sys.stderr, flush=True)
        os._exit(1)  # others may wait in a call that this one will never make
    _leave()
    sys.stdout.flush()
    os._exit(0)  # an interpreter that ends while threads of torch run may abort


if __name__ == "__main__":
    follow()
