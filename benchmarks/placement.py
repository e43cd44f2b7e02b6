"""Actor and critic on workers of their own: do their updates take as long as the longer of the two?

    python benchmarks/placement.py [--rounds 3]

`rein train` on made addition rows with `runtime=ray`, one worker of one thread each, `critic.placement`
separate and colocated. The wall seconds of all updates (the driver's clock) beside the seconds that each
role's worker was at work in backward passes and steps (its own clock). On cores that share their units, two
workers at once are each slower than one alone; what is compared are seconds of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

from rein.data import addition
from rein.models.tiny import make_tiny

HIDDEN, LAYERS, PROMPTS = 256, 6, 128
CALLS = ("learner.backward", "learner.apply", "learner.discard")
LIMIT = 1.25


def prepared(folder: Path) -> str:
    """A model, its own answers, and a recipe of them."""
    addition.write(folder / "data", 0, demonstrations=64, prompts=PROMPTS, dev=8, test=8, pairs=8)
    recipe: dict[str, Any] = {
        "out": str(folder / "made"),
        "stages": ["rollout", "score", "train"],
        "model": {"path": str(make_tiny(folder / "tiny", seed=0, hidden=HIDDEN, layers=LAYERS))},
        "data": {
            "val_files": str(folder / "data" / "dev.parquet"),
            "max_prompt_length": 16,
            "max_response_length": 48,
            "train_batch_size": 128,
        },
        "rollout": {"files": str(folder / "data" / "prompts.parquet"), "n": 4, "max_new_tokens": 40},
        "score": {"reward": {"name": "format", "options": {"pattern": "[0-4]{2}", "match": "search"}}},
        "actor": {"ppo_mini_batch_size": 64, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 1024},
        "trainer": {"critic_warmup": 0, "val_before_train": False},
        "guards": {"preset": "off", "probe_every": 1000},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    for stage in ("rollout", "score"):
        run(stage, file)
    return str(file)


def run(*words: object) -> None:
    command = [sys.executable, "-m", "rein", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def measured(file: str, placement: str, out: Path) -> dict[str, Any]:
    words = ["stages=[train]", "runtime=ray", "ray.cpus_per_worker=0.5", "resume=never"]
    words.append(f"critic.placement={placement}")
    rows = Path(file).parent / "made" / "score" / "trajectories.parquet"
    run("train", file, *words, f"data.train_files={rows}", f"out={out}")
    facts = json.loads((out / "train" / "manifest.json").read_text())["facts"]
    phases, workers = facts["speed"]["phases"], facts["workers"]
    busy = {
        role: sum(seconds for call, seconds in calls.items() if call in CALLS)
        for role, calls in workers.items()
    }
    wall = phases["update_actor"] + phases["update_critic"]
    row = {"placement": placement, "updates": facts["updates"], "wall_s": round(wall, 2)}
    return (
        row
        | {f"{role}_s": round(seconds, 2) for role, seconds in busy.items()}
        | {"over_the_longer": round(wall / max(busy.values()), 3)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = prepared(Path(folder))
        for number in range(args.rounds):
            for placement in ("separate", "colocated"):
                rows.append(measured(file, placement, Path(folder) / f"{placement}-{number}"))
                print(rows[-1], flush=True)
    ratio = median(row["over_the_longer"] for row in rows if row["placement"] == "separate")
    heads = ["placement", "updates", "wall s", "actor's worker s", "critic's worker s", "wall / the longer"]
    keys = ["placement", "updates", "wall_s", "actor_s", "critic_s", "over_the_longer"]
    shown = [[row.get(key, row.get("all_s", "")) for key in keys] for row in rows]
    text = (
        f"All updates of a run, one worker of one thread for each role. Apart, they take {ratio:.2f} times "
        f"the longer of the two (median of {args.rounds}; {LIMIT} was aimed at). Colocated, one worker does "
        f"both.\n\n{table(heads, shown)}"
    )
    write("placement", vars(args) | {"hidden": HIDDEN, "layers": LAYERS}, rows, text)
    print(text)


if __name__ == "__main__":
    main()
