"""SIGINT and SIGTERM become a flag that a loop reads between updates; a second SIGINT ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """`signal_number` is 0 until a signal came."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __bool__(self) -> bool:
        return self.signal_number != 0


@contextmanager
def deferred() -> Iterator[Interrupt]:
    """Inside, the first SIGINT or SIGTERM only sets the flag, so that state is saved between two updates."""
    flag = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if flag and number == signal.SIGINT:
            raise KeyboardInterrupt
        flag.signal_number = number

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
