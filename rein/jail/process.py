"""One program shut in: a JSON of settings as the first word, the work as JSON on standard input.

Three processes: the one that was started waits; the next is the first of its process namespace, so that all
others end with it; the last gives up its privileges and runs the work. Exit status: the program's, or
walls.NOT_SHUT.
"""

import json
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from rein.jail import answer, tests, walls
from rein.jail.wire import Link


def main() -> None:
    settings = json.loads(sys.argv[1])
    limits, level = walls.Limits(**settings["limits"]), settings["level"]
    with os.fdopen(os.dup(0), "rb") as file:
        work = json.loads(file.read())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    real_root = False
    started = os.getpid()
    try:
        if level == walls.NAMESPACES:
            real_root = walls.build(settings["scratch"], limits)
        end = signal.SIGKILL if level == walls.NAMESPACES else signal.SIGTERM
        walls.die_with(settings["parent"], end)
    except OSError as error:
        print(error, file=sys.stderr)
        os._exit(walls.NOT_SHUT)
    if level == walls.NAMESPACES and (first := os.fork()):
        _close(settings["fds"])
        _leave(os.waitpid(first, 0)[1])
    if level == walls.NAMESPACES:
        walls.die_with(0, signal.SIGKILL)
        os.chdir(walls.WORK)
    else:
        walls.adopt()
        signal.signal(signal.SIGTERM, _swept)
        os.chdir(settings["scratch"])
    root = real_root or (level == walls.LIMITS and os.geteuid() == 0)
    user = walls.OUTSIDE_USERS + started if root else None
    supervise(work, settings["fds"], level, limits, user)


def supervise(
    work: dict[str, Any], fds: list[int], level: str, limits: walls.Limits, user: int | None
) -> None:
    """Fork the program, wait for it, and take all it started with it."""
    program = os.fork()
    if program:
        _close(fds)
        _leave(walls.watch(program, limits) if level == walls.LIMITS else os.waitpid(program, 0)[1])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    walls.drop(user, level, limits)
    walls.die_with(0, signal.SIGKILL)
    if work["role"] == "probe":
        return
    if work["role"] == "program":
        answer.run_program(work["code"], work["given"])
        return
    link = Link(fds[0], fds[1], limits.output)
    if work["role"] == "answer":
        answer.serve(work["code"], link)
    else:
        walls.hide_memory()
        tests.run(work["plan"], link, fds[2])


def _swept(number: int, frame: FrameType | None) -> NoReturn:
    walls.sweep()
    os._exit(1)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
