"""A run as trackers see it, in a process of its own: numbers FIRST..LAST from what was resumed, then its end.

python track_run.py FOLDER TRACKER FROM_NUMBER LAST kill|close
"""

import os
import signal
import sys
from pathlib import Path

from rein.tracking.fanout import check_trackers, open_trackers
from rein.tracking.run import Run

SETTINGS = {"actor": {"optim": {"lr": 1e-6}, "note": "x" * 2000}, "stages": ["train"]}


def value(number: int) -> float:
    return number / 8


def main() -> None:
    folder, tracker, begin, last, end = sys.argv[1:]
    check_trackers([tracker])
    run = Run(Path(folder), int(begin), "addition", "small", SETTINGS)
    fanout = open_trackers([tracker], run)
    for number in range(int(begin) + 1, int(last) + 1):
        fanout.log({"actor/ppo_kl": value(number), "critic/vf_loss": float("nan")}, number)
        fanout.log({"perf/mfu@all": -value(number)}, number)  # a second call at the same number
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    fanout.close()


if __name__ == "__main__":
    main()
