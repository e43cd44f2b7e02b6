"""What fresh rollouts are worth: the demo trained on stored answers alone, and on answers made as it goes.

    python benchmarks/refresh.py --seeds 0 1 2 3 4 --out runs/refresh

Each seed's SFT model and 3,840 stored answers are made once. All ways make the same number of updates of the
same size: 9 batches of 1,104 rows (138 prompts x 8). `offline` goes three times over the stored answers to
414 prompts; `3 rounds` sees answers to as many prompts, but the later two thirds are written by the actor as
it is by then; `on-policy` has a batch of fresh answers for each of the 9. Each keeps its best checkpoint on
the 200 development problems and is measured once on the 500 test problems, greedy. Runs that are done are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
from demo_controls import run_words, shared_words
from results_io import table, write

from rein import manifest
from rein.commands import demo
from rein.data.split import holdout, prompt_key
from rein.functional.statistics import paired_bootstrap
from rein.runtime.seeding import derive
from rein.tracking.console import Console

PROMPTS, SAMPLES, BATCHES = 138, 8, 9
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}  # 97.5 % points of t, by number of seeds
EVERY = {"offline": 9, "3 rounds": 3, "on-policy": 1}  # batches between rollouts


class Row:
    def __init__(self, place: int, ids: list[int]) -> None:
        self.place, self.prompt_ids = place, np.array(ids)


def stored(base: Path, seed: int) -> None:
    """Of the stored answers those that training holds out, with those to 414 and to the first 138 others."""
    found = pq.read_table(base / "score" / "trajectories.parquet")
    rows = [Row(i, ids) for i, ids in enumerate(found["prompt_ids"].to_pylist())]
    train, held = holdout(rows, 0.05, derive(seed, "holdout"))
    keys = list(dict.fromkeys(prompt_key(row.prompt_ids) for row in train))
    for name, prompts in (("offline", 3 * PROMPTS), ("first", PROMPTS)):
        kept = set(keys[:prompts])
        places = sorted(row.place for row in [*held, *(r for r in train if prompt_key(r.prompt_ids) in kept)])
        pq.write_table(found.take(pa.array(places)), base / f"{name}.parquet")


def measured(base: Path, seed: int, name: str, console: Console) -> dict[str, Any]:
    """One way to train on one seed's rows, and its test accuracy."""
    every, out = EVERY[name], base / name.replace(" ", "-")
    words = [
        f"out={out}",
        f"seed={seed}",
        *shared_words(base),
        f"data.train_files={base}/{'offline' if every == BATCHES else 'first'}.parquet",
        "stages=[train,evaluate]",
        f"data.train_batch_size={PROMPTS * SAMPLES}",
        f"rollout.files={base}/data/prompts.parquet",
        f"rollout.max_prompts={PROMPTS}",
        f"trainer.total_training_steps={BATCHES}",
        f"trainer.refresh_every={every}",
    ]
    run_words(words, console)
    found = json.loads((out / "evaluate" / "evaluation.json").read_text())
    answers = pq.read_table(out / "evaluate" / "answers.parquet").to_pydict()
    facts = manifest.read(out / "train") or {}
    return {
        "seed": seed,
        "way": name,
        "before": found["before"]["accuracy"],
        "after": found["after"]["accuracy"],
        "updates": facts["facts"]["updates"],
        "problems": [float(score) for score in answers["after_score"]],
    }


def report(rows: list[dict[str, Any]], seeds: list[int]) -> str:
    """Write results/refresh.{json,md}."""
    by = {name: [row for row in rows if row["way"] == name] for name in EVERY}
    before = {row["seed"]: f"{row['before']:.3f}" for row in rows}
    body = [["(start)", "", *[before[seed] for seed in seeds], ""]]
    for name, every in EVERY.items():
        after = {row["seed"]: row["after"] for row in by[name]}
        cells = [f"{after[seed]:.3f}" if seed in after else "" for seed in seeds]
        mean = f"**{np.mean(list(after.values())):.3f}**" if len(after) == len(seeds) else ""
        body.append([name, str(every), *cells, mean])
    text = table(["way", "refresh_every", *[f"seed {s}" for s in seeds], "mean"], body)
    comparisons = []
    offline = {row["seed"]: row for row in by["offline"]}
    for name in [name for name in list(EVERY)[1:] if len(by[name]) > 1]:
        pairs = [(offline[row["seed"]], row) for row in by[name]]
        gaps = [other["after"] - one["after"] for one, other in pairs]
        sides = [
            torch.tensor(np.mean([row["problems"] for row in side], axis=0))
            for side in zip(*pairs, strict=True)
        ]
        low, high = paired_bootstrap(*sides)
        half = STUDENT[len(gaps)] * statistics.stdev(gaps) / len(gaps) ** 0.5
        gap = statistics.mean(gaps)
        text += (
            f"\n\n{name} minus offline, {len(gaps)} seeds: {gap:+.3f} (95 % {low:+.3f} to {high:+.3f}, "
            f"paired by problem; {gap - half:+.3f} to {gap + half:+.3f} over seeds)"
        )
        comparisons.append({"way": name, "gap": gap, "by_problem": [low, high], "over_seeds": half})
    kept = [{key: value for key, value in row.items() if key != "problems"} for row in rows]
    write("refresh", {"seeds": seeds, "comparisons": comparisons}, kept, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/refresh"))
    parser.add_argument("--ways", nargs="+", default=list(EVERY), choices=list(EVERY))
    arguments = parser.parse_args()
    console, rows = Console(quiet=True), []
    for seed in arguments.seeds:
        base = arguments.out / f"seed{seed}"
        demo.run([f"out={base}", f"seed={seed}", "stages=[sft,rollout,score]"], console)
        stored(base, seed)
        for name in arguments.ways:
            rows.append(measured(base, seed, name, console))
            print({key: rows[-1][key] for key in ("seed", "way", "before", "after", "updates")}, flush=True)
    print(report(rows, arguments.seeds))


if __name__ == "__main__":
    main()
