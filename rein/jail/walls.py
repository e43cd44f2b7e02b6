"""Shuts this process in: namespaces, a root of its own, no privileges, limits on what it may use.

`namespaces`: a process, network, mount and IPC namespace; of the file system only the interpreter and
system libraries, read-only, and /work, which lives in memory and goes with the last process. `limits`: the
kernel refuses that, so only the resource limits hold, and what is left running is swept at the end.
Everything here is plain system calls, made through the C library.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACES, LIMITS = "namespaces", "limits"
WORK = "/work"
WATCH = 0.01  # seconds between two counts of processes, where the kernel does not count
NOT_SHUT = 97  # exit status: the walls could not be built
_NEW_MOUNTS, _NEW_USER, _NEW_PIDS = 0x20000, 0x10000000, 0x20000000
_NEW_REST = 0x40000000 | 0x8000000 | 0x4000000  # network, IPC, host name
_READ_ONLY, _NO_SUID, _NO_DEVICES, _BIND, _DEEP, _PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_DEATH_SIGNAL, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 36, 38
_MOUNT_SETATTR = 442  # the same number on every architecture
_VISIBLE = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store")
_DEVICES = ("null", "zero", "full", "random", "urandom")
OUTSIDE_USERS = 1_000_000_000  # above the ids of people: one for each process that is shut in
_libc: Any = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    seconds: float = 10.0  # by the clock
    cpu_seconds: int = 10  # of a process
    memory: int = 1 << 30  # bytes of address space of a process
    output: int = 1 << 20  # bytes printed, and of one value passed
    files: int = 16 << 20  # bytes written, all files together in namespaces
    processes: int = 16


def build(scratch: str, limits: Limits) -> bool:
    """Namespaces and a root of their own; whether it was the real root who built them.

    `scratch`: an empty folder that the new root is mounted on. Raises OSError where the kernel refuses.
    """
    own = os.getuid(), os.getgid()
    try:
        if own[0] != 0:
            raise PermissionError
        _call("unshare", _NEW_MOUNTS | _NEW_PIDS | _NEW_REST)
        real_root = True
    except OSError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_REST)
        real_root = False
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"1000 {own[0]} 1"),
            ("gid_map", f"1000 {own[1]} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)
    _mount(None, "/", None, _DEEP | _PRIVATE)
    _new_root(scratch, limits)
    return real_root


def _new_root(root: str, limits: Limits) -> None:
    _mount("tmpfs", root, "tmpfs", _NO_SUID | _NO_DEVICES, "size=1m,nr_inodes=1000,mode=755")
    base = os.path.realpath(sys.base_prefix)
    shown = [*_VISIBLE, *([] if base.startswith(_VISIBLE) else [base])]
    for path in filter(os.path.lexists, shown):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        else:
            os.makedirs(root + path)
            _mount(path, root + path, None, _BIND | _DEEP)
            _restrict(root + path, _READ_ONLY | _NO_SUID | _NO_DEVICES, deep=True)
    os.mkdir(f"{root}/dev")
    for name in _DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            pass
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    os.mkdir(root + WORK)
    room = f"size={limits.files},nr_inodes=10000,mode=1777"
    _mount("tmpfs", root + WORK, "tmpfs", _NO_SUID | _NO_DEVICES, room)
    os.symlink("work", f"{root}/tmp")
    _restrict(root, _READ_ONLY, deep=False)
    os.chdir(root)
    _call("pivot_root", b".", b".")  # the old root now lies over the new one
    _call("umount2", b".", 2)
    os.chdir("/")


def drop(user: int | None, level: str, limits: Limits) -> None:
    """Give up every privilege and set the limits: the last act before a program that nobody vouches for.

    `user`: whom to become, where root built the namespaces or has none.
    """
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_FSIZE, limits.files),
        (resource.RLIMIT_NOFILE, 64),
    ):
        _limit(kind, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    if level == NAMESPACES or (user is not None and _become_other(user)):
        _limit(resource.RLIMIT_NPROC, limits.processes)
    else:  # the kernel counts all processes of the user, and none of root's
        _limit(resource.RLIMIT_NPROC, limits.processes + _processes_of(os.getuid()))
    if level == NAMESPACES and user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _no_capabilities()
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def _become_other(user: int) -> bool:
    """Root without namespaces becomes another user as far as it can, so that the kernel counts its processes.

    Where nobody else may read the interpreter, the files stay root's, without root's privileges.
    """
    folders = Path(os.path.realpath(os.__file__)).parents
    readable = all(folder.stat().st_mode & 0o5 == 0o5 for folder in folders)
    try:
        if readable:
            os.chown(".", user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
        os.setresuid(user, *((user, user) if readable else (-1, -1)))
    except OSError:
        return False
    return True


def _no_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def die_with(parent: int, number: int) -> None:
    """From now on the kernel sends this process a signal when its parent ends; `parent` 0 is not checked."""
    _call("prctl", _DEATH_SIGNAL, number, 0, 0, 0)
    if parent not in (0, os.getppid()):
        os._exit(NOT_SHUT)


def adopt() -> None:
    """Orphans of this process's children become its own children, so that `sweep` finds them."""
    _call("prctl", _SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Another process of the same user may not look into this one."""
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)


def watch(program: int, limits: Limits) -> int:
    """Wait for a program of level `limits` and sweep what it leaves; one that multiplies too far ends."""
    while (ended := os.waitpid(program, os.WNOHANG)) == (0, 0):
        if len(_children(os.getpid())) > limits.processes:
            os.kill(program, signal.SIGKILL)
            sweep()
            return int(signal.SIGKILL)
        time.sleep(WATCH)
    sweep()
    return ended[1]


def sweep(seconds: float = 2.0) -> None:
    """End whatever descends from this process, however fast it multiplies; gives up after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and (found := _children(os.getpid())):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            _kill(found, number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def end_session(leader: int, seconds: float = 2.0) -> None:
    """End all that is left of a session; gives up after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = {pid: int(fields[2]) for pid, fields in _all_processes() if int(fields[3]) == leader}
        if not found:
            return
        _kill(found, signal.SIGKILL)
        time.sleep(WATCH)


def _kill(found: Mapping[int, int], number: int) -> None:
    """Signal these processes, of groups other than ours the whole group at once: forks do not escape that."""
    for group in set(found.values()) - {os.getpgrp()}:
        with suppress(OSError):
            os.killpg(group, number)
    for pid in found:
        with suppress(OSError):
            os.kill(pid, number)


def _children(root: int) -> dict[int, int]:
    """All living descendants of a process, each with its process group."""
    living = {pid: fields for pid, fields in _all_processes() if fields[0] != "Z"}
    found, new = dict[int, int](), {root}
    while new:
        new = {pid for pid, fields in living.items() if int(fields[1]) in new}
        found |= {pid: int(living[pid][2]) for pid in new}
    return found


def _processes_of(user: int) -> int:
    count = 0
    for pid, _ in _all_processes():
        with suppress(OSError):
            count += os.stat(f"/proc/{pid}").st_uid == user and len(os.listdir(f"/proc/{pid}/task"))
    return count


def _all_processes() -> list[tuple[int, list[str]]]:
    """(pid, [state, parent, group, session, ...]) of every process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            found.append((int(name), file.read().rpartition(")")[2].split()))
    return found


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    _call("mount", *words, flags, data.encode())


def _restrict(target: str, flags: int, *, deep: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)  # the flags have the same values as mount's
    arguments = (ctypes.c_char_p(target.encode()), 0x8000 if deep else 0, ctypes.byref(attributes), 32)
    _call("syscall", ctypes.c_long(_MOUNT_SETATTR), -100, *arguments)


def _call(name: str, *arguments: Any) -> None:
    try:
        function = getattr(_libc, name)
    except AttributeError as error:
        raise OSError(f"no {name} here") from error
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
