"""What the reins cost: the share of the demo's training that probes, guards and snapshots take.

    python benchmarks/guard_overhead.py --out runs/guard_overhead

The demo's training, with its default guards, on one core. Time inside each part is measured around it, so the
share does not hang on how two runs differ; a run with guards.preset=off (no guards, no rollback points, the
probe as before) stands beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

from rein.commands.demo import recipe_of
from rein.commands.demo import run as demo
from rein.stages import train
from rein.stages.train_job import Job
from rein.tracking.console import Console

PARTS = {"probe": ("probe", "measure"), "snapshots": ("snapshots", "save")}
JUDGED = ("before", "after")


def timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*words: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*words, **named)
        finally:
            spent[name] += time.perf_counter() - began

    return inner


def measured(words: list[str]) -> dict[str, float]:
    """Seconds of one training run: in all, and inside each part."""
    spent: dict[str, float] = defaultdict(float)
    recipe, _ = recipe_of([*words, "stages=[train]", "resume=never"])
    opened = train.open_job

    def open_job(*words: Any, **named: Any) -> Job:
        job = opened(*words, **named)
        for name, (owner, method) in PARTS.items():
            part = getattr(job, owner)
            setattr(part, method, timed(spent, name, getattr(part, method)))
        for method in JUDGED:
            setattr(job.reins, method, timed(spent, "guards", getattr(job.reins, method)))
        spent["began"] = time.perf_counter()
        return job

    train.open_job = open_job
    try:
        facts = train.run(recipe, Console(quiet=True))
    finally:
        train.open_job = opened
    spent["loop"] = time.perf_counter() - spent.pop("began")
    return dict(spent) | {"updates": facts["updates"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/guard_overhead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    base = Path(given.out) / "demo"
    shared = [f"out={base}", f"seed={given.seed}"]
    demo([*shared, "stages=[sft,rollout,score]"], Console(quiet=True))
    shared += [f"model.path={base}/sft/model", f"data.train_files={base}/score/trajectories.parquet"]
    rows = []
    for number in range(given.runs):
        for preset in ("standard", "off"):
            found = measured([*shared, f"guards.preset={preset}"])
            rows.append({"run": number, "preset": preset} | found)
            print(json.dumps(rows[-1]), flush=True)
    on = [row for row in rows if row["preset"] == "standard"]
    parts = [*PARTS, "guards"]
    shares = {part: sorted(row.get(part, 0.0) / row["loop"] for row in on)[len(on) // 2] for part in parts}
    total = sorted(sum(row.get(part, 0.0) for part in parts) / row["loop"] for row in on)[len(on) // 2]
    lines = [[part, f"{100 * share:.2f} %"] for part, share in shares.items()] + [
        ["all", f"{100 * total:.2f} %"]
    ]
    seconds = {
        preset: sorted(row["loop"] for row in rows if row["preset"] == preset)[given.runs // 2]
        for preset in ("standard", "off")
    }
    said = f"Median seconds of the whole loop: standard {seconds['standard']:.1f}, off {seconds['off']:.1f}."
    body = table(["part", "share of the loop's time (median)"], lines)
    settings = {"seed": given.seed, "runs": given.runs, "share": total}
    write("guard_overhead", settings, rows, f"{body}\n\n{said}")


if __name__ == "__main__":
    main()
