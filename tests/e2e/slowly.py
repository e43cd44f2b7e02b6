"""A user's reward that takes its time, tells a file of every row, and fails where it is told to."""

import os
import signal
import time
from typing import Any


def length(
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    log: str,
    seconds: float = 0.0,
    fail: str = "",  # "raise", "exit" in a process without a word, "signal" its own process
) -> float:
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    if fail == "raise":
        raise ValueError("no such length")
    if fail == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if fail == "exit":
        os._exit(1)
    return float(len(solution_str))
