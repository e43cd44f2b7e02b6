"""What was tried to bring PPO level with filtered cloning under the exact reward, on development problems.

    python benchmarks/demo_variants.py --seeds 0 1 --out runs/controls    (after demo_controls.py: same rows)

The 500 test problems are not touched. "best" is the checkpoint that would be kept, "last" the end of the run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from demo_controls import base_run, run_words, shared_words
from results_io import table, write

from rein import manifest
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics

_CLONING = ["algorithm.method=filtered_bc", "actor.optim.lr=5e-4", "data.train_batch_size=512"]
_HASTY = ["critic.optim.lr=1e-4", "trainer.critic_warmup=26", "trainer.total_epochs=4"]
VARIANTS: dict[str, list[str]] = {
    "filtered cloning": [*_CLONING, "trainer.total_epochs=8", "trainer.test_freq=2"],
    "PPO as in the demo": [],
    "critic at lr 1e-4 for 26 updates, one batch an epoch": [*_HASTY, "data.train_batch_size=3328"],
    "the same critic, four batches an epoch": [*_HASTY, "data.train_batch_size=832"],
    "the demo's critic, one batch an epoch": ["data.train_batch_size=3328", "trainer.total_epochs=4"],
    "the demo's critic fitted for 208 updates": ["trainer.critic_warmup=208"],
    "actor lr 2e-4": ["actor.optim.lr=2e-4"],
    "exact KL": ["actor.kl_loss_type=full"],
}


def variant_run(base: Path, seed: int, name: str, console: Console) -> dict[str, Any]:
    out = base / "exact" / ("variant_" + "".join(c if c.isalnum() else "_" for c in name))
    words = [f"out={out}", f"seed={seed}", "reward=exact", *shared_words(base), "stages=[train]"]
    run_words([*words, f"data.train_files={base}/exact/score/trajectories.parquet", *VARIANTS[name]], console)
    scores = [row["val/score"] for row in read_metrics(out / "train" / "metrics.jsonl") if "val/score" in row]
    facts = manifest.read(out / "train") or {}
    return {
        "variant": name,
        "seed": seed,
        "best": max(scores),
        "last": scores[-1],
        "seconds": facts["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path("runs/controls"))
    arguments = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    for seed in arguments.seeds:
        base = base_run(arguments.out, seed, console)
        for name in VARIANTS:
            rows.append(variant_run(base, seed, name, console))
            print(rows[-1], flush=True)
    body = []
    for name in VARIANTS:
        own = [row for row in rows if row["variant"] == name]
        cells = [f"{row['best']:.3f} / {row['last']:.3f}" for row in own]
        body.append(
            [
                name,
                *cells,
                f"{np.mean([row['best'] for row in own]):.3f}",
                f"{np.mean([row['seconds'] for row in own]):.0f}",
            ]
        )
    head = ["variant", *[f"seed {s}: best / last" for s in arguments.seeds], "mean best", "seconds"]
    text = [
        (__doc__ or "").split("\n\n")[0],
        table(head, body),
        "200 development problems, so a standard error of about 0.02.",
    ]
    write("demo_variants", {"variants": VARIANTS, "seeds": arguments.seeds}, rows, "\n\n".join(text))


if __name__ == "__main__":
    main()
