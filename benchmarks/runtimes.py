"""The demo in one process, over FSDP2 and on Ray: the same first updates, the same end within noise.

    python benchmarks/runtimes.py [--seed 0] [--out runs/runtimes]

The start model and its stored answers are made once. Every runtime trains on them by the demo's recipe and
is measured on its 500 test problems. Beside the accuracies: how far losses and gradient norms of each role's
first five updates are from those of one process, relative, in float32 and, in a second short run, in float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
from demo_controls import shared_words
from placement import run as rein
from results_io import table, write

from rein.functional.statistics import paired_bootstrap
from rein.tracking.jsonl import read_metrics

RUNTIMES = {
    "one process": (),
    "FSDP2, 2 ranks": ("runtime=fsdp", "nproc=2"),
    "FSDP2, 3 ranks": ("runtime=fsdp", "nproc=3"),
    "Ray, 2 workers": ("runtime=ray", "nproc=2", "ray.cpus_per_worker=0.5"),
    "Ray, 3 workers": ("runtime=ray", "nproc=3", "ray.cpus_per_worker=0.3"),
    "Ray, critic apart": ("runtime=ray", "critic.placement=separate", "ray.cpus_per_worker=0.5"),
}
TRAINED = ("one process", "FSDP2, 2 ranks", "Ray, 2 workers", "Ray, critic apart")  # to the end
FIRST = 5
LOSSES = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm")


def trained(base: Path, seed: int, out: Path, *words: str) -> Path:
    """`rein run` of training and evaluation on the stored answers; what is done is not repeated."""
    own = [f"out={out}", f"seed={seed}", *shared_words(base)]
    rein("run", "demo", *own, f"data.train_files={base}/score/trajectories.parquet", *words)
    return out


def first(out: Path) -> dict[str, list[float]]:
    """Of each loss and norm the first numbers, in order."""
    lines = read_metrics(out / "train" / "metrics.jsonl")
    return {name: [line[name] for line in lines if name in line][:FIRST] for name in LOSSES}


def apart(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    pairs = [(a, b) for name in LOSSES for a, b in zip(one[name], other[name], strict=True)]
    assert len(pairs) == FIRST * len(LOSSES)
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)


def problems(out: Path) -> torch.Tensor:
    answers = pq.read_table(out / "evaluate" / "answers.parquet").to_pydict()
    return torch.tensor([float(score) for score in answers["after_score"]])


def measured(base: Path, seed: int, out: Path, names: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, words in ((name, RUNTIMES[name]) for name in names):
        folder = out / name.replace(", ", "-").replace(" ", "-").lower()
        short = ("stages=[train]", "trainer.total_training_steps=1", "data.train_batch_size=640")
        few = ("trainer.critic_warmup=0", "trainer.val_before_train=false", "guards.preset=off")
        for dtype in ("float32", "float64"):
            trained(base, seed, folder / dtype, *words, *short, *few, f"model.dtype={dtype}")
        row = {"runtime": name} | {dtype: first(folder / dtype) for dtype in ("float32", "float64")}
        if name in TRAINED:
            trained(base, seed, folder / "whole", *words, "stages=[train,evaluate]")
            found = json.loads((folder / "whole" / "evaluate" / "evaluation.json").read_text())
            row |= {"after": found["after"]["accuracy"], "problems": problems(folder / "whole")}
        rows.append(row)
        print(name, row.get("after"), flush=True)
    return rows


def report(rows: list[dict[str, Any]], seed: int) -> str:
    one, kept, body = rows[0], list[dict[str, Any]](), list[list[str]]()
    for row in rows:
        line: dict[str, Any] = {"runtime": row["runtime"]}
        line |= {dtype: apart(one[dtype], row[dtype]) for dtype in ("float32", "float64")}
        shown = [row["runtime"], f"{line['float64']:.1e}", f"{line['float32']:.1e}", "", ""]
        if "after" in row:
            low, high = paired_bootstrap(one["problems"], row["problems"])
            gap = (row["problems"] - one["problems"]).mean().item()
            line |= {"after": row["after"], "gap": gap, "ci95": [low, high]}
            shown[3:] = [f"{row['after']:.3f}", f"{gap:+.3f} ({low:+.3f} to {high:+.3f})"]
        kept.append(line)
        body.append(shown)
    heads = ["runtime", "first updates apart, float64", "float32", "accuracy", "less one process's"]
    text = f"Losses and gradient norms of each role's first {FIRST} updates.\n\n{table(heads, body)}"
    write("runtimes", {"seed": seed}, kept, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/runtimes"))
    parser.add_argument("--only", nargs="+", choices=list(RUNTIMES), default=list(RUNTIMES))
    args = parser.parse_args()
    base = args.out / "base"
    if not (base / "score" / "trajectories.parquet").exists():
        rein("demo", f"out={base}", f"seed={args.seed}")
    print(report(measured(base, args.seed, args.out, args.only), args.seed))


if __name__ == "__main__":
    main()
