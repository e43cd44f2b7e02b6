"""Whether training in `fast` ends as good as in `exact`: the demo, several seeds, the same stored answers.

    python benchmarks/demo_precision.py --seeds 0 1 2 3 4 --out runs/precision

Each seed's start model and stored answers are made once. Both precisions train on them with the demo's
recipe, keep their best checkpoint on the 200 development problems, and are measured once on the 500 test
problems, greedy, in float32. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
from demo_controls import run_words, shared_words
from results_io import table, write

from rein import manifest
from rein.commands import demo
from rein.functional.statistics import paired_bootstrap
from rein.tracking.console import Console

PRECISIONS = ("exact", "fast")


def measured(base: Path, seed: int, precision: str, console: Console) -> dict[str, Any]:
    """One training and its test accuracy; the one in `exact` is the demo itself."""
    out = base
    if precision == "fast":
        out = base / "fast"
        words = [f"out={out}", f"seed={seed}", "reward=exact", *shared_words(base)]
        words += [f"data.train_files={base}/score/trajectories.parquet", "stages=[train,evaluate]"]
        run_words([*words, "model.precision=fast"], console)
    found = json.loads((out / "evaluate" / "evaluation.json").read_text())
    answers = pq.read_table(out / "evaluate" / "answers.parquet").to_pydict()
    return {
        "seed": seed,
        "precision": precision,
        "before": found["before"]["accuracy"],
        "after": found["after"]["accuracy"],
        "seconds": (manifest.read(out / "train") or {}).get("seconds"),
        "problems": [float(score) for score in answers["after_score"]],
    }


def report(rows: list[dict[str, Any]], seeds: list[int]) -> str:
    """Write results/demo_precision.{json,md}."""
    by = {name: [row for row in rows if row["precision"] == name] for name in PRECISIONS}
    body = [["(start)", *[f"{row['before']:.3f}" for row in by["exact"]], ""]]
    for name in PRECISIONS:
        after = [row["after"] for row in by[name]]
        body.append([name, *[f"{a:.3f}" for a in after], f"**{np.mean(after):.3f}**"])
    means = {
        name: torch.tensor(np.mean([row["problems"] for row in by[name]], axis=0)) for name in PRECISIONS
    }
    low, high = paired_bootstrap(means["exact"], means["fast"])
    gap = (means["fast"] - means["exact"]).mean().item()
    said = f"fast minus exact: {gap:+.3f} (95 % {low:+.3f} to {high:+.3f}, paired by problem)"
    text = f"{table(['precision', *[f'seed {s}' for s in seeds], 'mean'], body)}\n\n{said}"
    kept = [{key: value for key, value in row.items() if key != "problems"} for row in rows]
    write("demo_precision", {"seeds": seeds, "difference": gap, "ci95": [low, high]}, kept, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    arguments = parser.parse_args()
    console, rows = Console(), []
    for seed in arguments.seeds:
        base = arguments.out / f"seed{seed}"
        demo.run([f"out={base}", f"seed={seed}"], console)
        rows += [measured(base, seed, precision, console) for precision in PRECISIONS]
        print([(row["precision"], row["before"], row["after"]) for row in rows[-2:]], flush=True)
    print(report(rows, arguments.seeds))


if __name__ == "__main__":
    main()
