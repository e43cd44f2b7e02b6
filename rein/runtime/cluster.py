"""A Ray cluster from outside: joined where the recipe names one, else started here and ended with the run.

Says what a run asks for and what the cluster has. Imports ray when used; knows no models.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rein.errors import ConfigError, EngineError, RankLost
from rein.runtime import sweep

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` uploads the current folder
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else its core writes to stderr
}
OBJECTS = 2**30  # bytes of shared memory for what moves between processes of a cluster started here
HEARD = 10.0  # seconds within which the machine of a cluster answers
FULL = 60.0  # seconds that a run waits for what others hold, or for a lost machine's replacement
# What opens HTTP/2 (RFC 9113, 3.4 and 6.5): its server answers with a frame of the same kind, settings.
SETTINGS = b"\x04"
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
Bundle = Mapping[str, float]  # of resources on one machine: {"CPU": 2.0}


def ray_module() -> Any:
    """Ray. Raises ConfigError where it is not installed."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    try:
        import ray
    except ImportError as error:
        raise ConfigError("runtime: ray is not installed; pip install 'rein[ray]'") from error
    logging.getLogger("ray").setLevel(logging.ERROR)  # importing it has set another
    return ray


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Inside, Ray is there: the cluster at `address`, else one of this machine that ends here.

    Inside another one it is that. Raises ConfigError where no cluster answers.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    with nullcontext() if address else _own_folder() as folder:
        try:
            _start(ray, address, folder)
            yield
        finally:
            with suppress(Exception):  # of a cluster that is gone
                ray.shutdown()


@contextmanager
def _own_folder() -> Iterator[str]:
    """A folder for a cluster of this machine; whatever ends this process, no process of it outlives that."""
    # The names of Ray's sockets in it may have 107 characters: a long TMPDIR leaves no room.
    own = "/tmp" if os.access("/tmp", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="rein-ray-", dir=own)
    command = [sys.executable, "-I", str(Path(sweep.__file__)), folder]
    sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        assert sweeper.stdin is not None
        sweeper.stdin.close()
        sweeper.wait()


def _call(address: str) -> None:
    """Raise OSError where no gRPC server answers at HOST:PORT: Ray tries for minutes, silent, and hears no
    Ctrl-C.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=HEARD) as peer:
        if os.environ.get("RAY_USE_TLS", "0") not in ("1", "true", "True"):
            peer.settimeout(HEARD)
            peer.sendall(HELLO)
            if peer.recv(9)[3:4] != SETTINGS:
                raise OSError("what listens there is not Ray")


def _start(ray: Any, address: str | None, folder: str | None) -> None:
    own = {"include_dashboard": False, "object_store_memory": OBJECTS, "_temp_dir": folder}
    former = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _call(address)
        with _quiet_stderr():
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
                **({} if address else own),
            )
        ray._private.worker._worker_logs_enabled = False  # it would print what it does about lost workers
    except (OSError, RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())[:200]
        where = f"ray.address: {address} gives no cluster" if address else "runtime: ray does not start"
        do = "check `ray status` there"
        if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
            do += ", and where that cluster asks for a token set RAY_AUTH_MODE=token"  # Ray says not why
        raise ConfigError(f"{where} ({what}); {do}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, former)  # Ray has put its own in its place


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Inside, nothing comes on the process's stderr: Ray's core tells there of its own settings."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def refuse_more(bundles: Sequence[Bundle], *, again: bool = False) -> None:
    """Raise ConfigError where the cluster as a whole has less than is asked for.

    `again`, after something was lost, it may come back: RankLost where it has not in FULL seconds.
    """
    end = time.monotonic() + FULL
    while again and _lacking(bundles) and time.monotonic() < end:
        time.sleep(0.2)
    if lacking := _lacking(bundles):
        raise (RankLost if again else ConfigError)(
            f"runtime: ray: {_asked(bundles)} asked for, {lacking}; lower nproc, nnodes, "
            "ray.cpus_per_worker or ray.gpus_per_worker (critic.placement=separate asks for twice as much), "
            "or join a larger cluster (ray.address)"
        )


def reserved(bundles: Sequence[Bundle], *, again: bool = False) -> Any:
    """A placement group of these bundles, on as many machines as there are, waited for up to FULL seconds.

    Raises EngineError where others hold what is asked for, ConfigError at once where the cluster is too
    small; `again`, after something was lost, RankLost instead of both: it may come back.
    """
    from ray.util import placement_group, remove_placement_group

    end = time.monotonic() + FULL
    while again and _lacking(bundles) and time.monotonic() < end:
        time.sleep(0.2)
    if not again:
        refuse_more(bundles)
    group = placement_group([dict(bundle) for bundle in bundles], strategy="SPREAD")
    try:
        while not group.wait(0.5):  # in turns: a signal is heard between them
            if time.monotonic() > end:
                free = _said(ray_module().available_resources())
                kind = RankLost if again else EngineError
                raise kind(
                    f"runtime: ray: {_asked(bundles)} asked for, {free} free after {FULL:.0f} s; wait for "
                    "other work to end or lost machines to return, or ask for less"
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _lacking(bundles: Sequence[Bundle]) -> str:
    """What the cluster lacks for them; nothing where each finds its place."""
    machines = [dict(node["Resources"]) for node in ray_module().nodes() if node["Alive"]]
    found = f"the cluster has {_said(_sum(machines))} on {len(machines)} machine(s)"
    for bundle in sorted(bundles, key=lambda bundle: -sum(bundle.values())):
        for machine in machines:
            if all(machine.get(name, 0.0) >= count - 1e-9 for name, count in bundle.items()):
                for name, count in bundle.items():
                    machine[name] = machine.get(name, 0.0) - count
                break
        else:
            return found
    return ""


def _sum(bundles: Sequence[Bundle]) -> dict[str, float]:
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _asked(bundles: Sequence[Bundle]) -> str:
    return f"{len(bundles)} x ({_said(bundles[0])})"


def _said(resources: Bundle) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
