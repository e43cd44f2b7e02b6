"""PPO beside its controls on the demo's rows: the same stored answers, about the same compute, several seeds.

    python benchmarks/demo_controls.py --seeds 0 1 2 3 4 --out runs/controls

Every method starts from the same SFT model and sees the same 3,840 stored answers (512 held out), scored by
the exact verifier or by the noisy one that accepts 40 % of the wrong answers. Each keeps its best checkpoint
on the 200 development problems (continued SFT its last) and is measured once on the 500 test problems,
greedy, against the truth. The column of seconds is the training alone, one core each of two that shared a
machine with other work. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
from results_io import into_page, table, write

from rein import manifest
from rein.commands import demo
from rein.commands.demo import recipe_of
from rein.functional.statistics import paired_bootstrap
from rein.stages import pipeline
from rein.tracking.console import Console

# What each method changes of the demo's recipe. Rates and lengths were chosen on development problems.
METHODS: dict[str, list[str]] = {
    "continued SFT": [
        "stages=[sft,evaluate]",
        "sft.total_steps=200",
        "sft.optim={lr: 5e-4, lr_scheduler_type: cosine, lr_warmup_steps: 20}",
    ],
    "filtered cloning": [
        "stages=[train,evaluate]",
        "algorithm.method=filtered_bc",
        "actor.optim.lr=5e-4",
        "data.train_batch_size=512",
        "trainer.total_epochs=8",
        "trainer.test_freq=2",
    ],
    "PPO": ["stages=[train,evaluate]"],
    "PPO without KL": ["stages=[train,evaluate]", "actor.use_kl_loss=false"],
    "PPO, V-trace": ["stages=[train,evaluate]", "algorithm.adv_estimator=vtrace"],
    "PPO, group baseline": ["stages=[train,evaluate]", "algorithm.method=grpo"],
    "TOPR": [
        "stages=[train,evaluate]",
        "algorithm.method=topr",
        "actor.use_kl_loss=false",
        "actor.optim.lr=2e-4",
        "trainer.total_epochs=4",
    ],
    "AWR": [
        "stages=[train,evaluate]",
        "algorithm.method=awr",
        "actor.use_kl_loss=false",
        "actor.optim.lr=5e-4",
    ],
    "DPO with NLL": [
        "stages=[train,evaluate]",
        "algorithm.method=dpo",
        "actor.policy_loss={dpo_beta: 0.1, dpo_nll_coef: 1.0}",
        "actor.optim.lr=2e-4",
        "data.train_batch_size=512",
        "trainer.test_freq=2",
    ],
}
SCORED_BY_FILE = {"continued SFT"}  # learns from demonstrations: the reward plays no part


def base_run(out: Path, seed: int, console: Console) -> Path:
    """The demo itself (its SFT model, its stored answers), and one scored file for each reward."""
    base = out / f"seed{seed}"
    demo.run([f"out={base}", f"seed={seed}"], console)
    for reward in ("exact", "noisy"):
        words = [
            f"out={base / reward}",
            f"seed={seed}",
            f"reward={reward}",
            *shared_words(base),
            "stages=[score]",
        ]
        run_words([*words, f"score.files={base}/rollout/trajectories.parquet"], console)
    return base


def shared_words(base: Path) -> list[str]:
    data = base / "data"
    return [
        f"model.path={base}/sft/model",
        f"data.val_files={data}/dev.parquet",
        f"evaluate.files={data}/test.parquet",
        f"sft.files={data}/demonstrations.parquet",
        "evaluate.pass_k=0",
    ]


def run_words(words: Sequence[str], console: Console) -> None:
    recipe, _ = recipe_of(words)
    pipeline.run(recipe, console)


def method_run(base: Path, seed: int, reward: str, name: str, console: Console) -> dict[str, Any]:
    """One method on one seed's rows; its test accuracy and what each problem scored."""
    shared_by_rewards = name in SCORED_BY_FILE
    out = base / ("" if shared_by_rewards else reward) / name.replace(" ", "_")
    words = [f"out={out}", f"seed={seed}", f"reward={reward}", *shared_words(base)]
    words += [f"data.train_files={base}/{reward}/score/trajectories.parquet", *METHODS[name]]
    if shared_by_rewards:
        words += [f"evaluate.before={base}/sft/model", f"evaluate.after={out}/sft/model"]
    if (name, reward) == ("PPO", "exact"):
        out = base  # the demo is this run
    else:
        run_words(words, console)
    found = json.loads((out / "evaluate" / "evaluation.json").read_text())
    answers = pq.read_table(out / "evaluate" / "answers.parquet").to_pydict()
    stage = "sft" if shared_by_rewards else "train"
    facts = manifest.read(out / stage) or {}
    return {
        "seed": seed,
        "reward": reward,
        "method": name,
        "before": found["before"]["accuracy"],
        "after": found["after"]["accuracy"],
        "lift": found["lift"],
        "lift_ci95": found["lift_ci95"],
        "seconds": facts.get("seconds"),
        "problems": [float(score) for score in answers["after_score"]],
    }


def compare(rows: list[dict[str, Any]], reward: str, ours: str, other: str) -> dict[str, Any]:
    """Mean difference over seeds, paired by problem: a problem's score is its mean over the seeds."""

    def means(name: str) -> torch.Tensor:
        chosen = [row["problems"] for row in rows if row["method"] == name and row["reward"] == reward]
        return torch.tensor(np.mean(chosen, axis=0))

    low, high = paired_bootstrap(means(other), means(ours))
    difference = (means(ours) - means(other)).mean().item()
    return {"reward": reward, "ours": ours, "other": other, "difference": difference, "ci95": [low, high]}


def report(rows: list[dict[str, Any]], seeds: Sequence[int]) -> None:
    """Write results/demo_controls.{json,md}."""
    text, comparisons = [__doc__.split("\n\n")[2] if __doc__ else ""], []
    for reward in ("exact", "noisy"):
        body = []
        for name in METHODS:
            own = [row for row in rows if row["method"] == name and row["reward"] == reward]
            if len(own) == len(seeds):
                after = [row["after"] for row in own]
                seconds = np.mean([row["seconds"] for row in own])
                cells = [f"{a:.3f}" for a in after]
                body.append([name, *cells, f"**{np.mean(after):.3f}**", f"{seconds:.0f}"])
        before = [row["before"] for row in rows if row["method"] == "PPO" and row["reward"] == reward]
        body.insert(0, ["(start)", *[f"{b:.3f}" for b in before], f"**{np.mean(before):.3f}**", ""])
        head = ["method", *[f"seed {s}" for s in seeds], "mean", "seconds"]
        text += [f"**{reward} reward**", table(head, body)]
        for other in METHODS:
            if other != "PPO" and any(cells[0] == other for cells in body):
                found = compare(rows, reward, "PPO", other)
                comparisons.append(found)
                low, high = found["ci95"]
                gap = f"{found['difference']:+.3f} (95 % {low:+.3f} to {high:+.3f}, paired by problem)"
                text.append(f"PPO minus {other}: {gap}")
    into_page("demo_controls", "\n\n".join(text[1:]))
    kept = [{key: value for key, value in row.items() if key != "problems"} for row in rows]
    write(
        "demo_controls",
        {"methods": METHODS, "seeds": list(seeds), "comparisons": comparisons},
        kept,
        "\n\n".join(text),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/controls"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    arguments = parser.parse_args()
    console, rows = Console(), []
    for seed in arguments.seeds:
        base = base_run(arguments.out, seed, console)
        for reward in ("exact", "noisy"):
            for name in arguments.methods:
                rows.append(method_run(base, seed, reward, name, console))
                print(
                    {
                        key: rows[-1][key]
                        for key in ("seed", "reward", "method", "before", "after", "seconds")
                    },
                    flush=True,
                )
    report(rows, arguments.seeds)


if __name__ == "__main__":
    main()
