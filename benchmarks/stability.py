"""Does a run survive hostile set-ups, with the guards on and off?

    python benchmarks/stability.py --out runs/stability
    python benchmarks/stability.py --setups "rate x10" drift --seeds 0 --no-report

Twenty set-ups, each a mistake a user makes, on three seeds, beside the healthy set-up on ten. Each run is the
demo's on a part of its rows, 156 updates; all of a seed begin with the same start policy, stored answers and
fitted critic. What counts is the state a run ends with (not its best), greedy on 2,000 problems that nothing
else has touched, by the truth. A run that a guard stops, or that is refused, ships its start. Stable: finite,
and at or above the start's accuracy less two points. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process a core
sys.path.insert(0, str(Path(__file__).parent))
from stability_report import HEALTHY_NAME, report
from stability_setups import HEALTHY, SETUPS, Rows, Setup, World
from verdict_data import TRUTH

from rein.commands.demo import recipe_of
from rein.config.recipe import Guards, Recipe
from rein.data import addition
from rein.data.loader import load_prompts, load_trajectories
from rein.data.parquet import read_rows, write_rows
from rein.data.schemas import PROMPTS, TRAJECTORIES, trajectory_row
from rein.engines.hf import HfEngine
from rein.errors import ConfigError, DataError, GuardStop, ReinError
from rein.models.actor import Actor, load_actor
from rein.models.tiny import make_tiny
from rein.stages import pipeline, train
from rein.stages.tokens import encoder_of
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.validator import Validator

QUIET = Console(quiet=True)
TEST = 2000  # problems
TEST_SEED = 40_000_021
EARLIER = 180  # SFT steps of the earlier state; the start policy has 300


def made(words: Sequence[str]) -> Recipe:
    return recipe_of(words)[0]


def shared_words(base: Path, seed: int) -> list[str]:
    data = base / "data"
    return [
        f"seed={seed}",
        f"cache={base}/cache",
        f"data.val_files={data}/dev.parquet",
        f"evaluate.files={data}/unseen.parquet",
        f"sft.files={data}/demonstrations.parquet",
        f"rollout.files={data}/prompts.parquet",
    ]


def make_base(out: Path, seed: int, hostile: bool) -> Path:
    """Data, start policy, its stored answers, a fitted critic and the start's accuracy, once per seed."""
    base = out / f"seed{seed}"
    if not (base / "data" / "unseen.parquet").exists():
        addition.write(base / "data", seed)
        make_tiny(base / "base", seed=seed)
        write_unseen(base / "data")
    words = [*shared_words(base, seed), f"model.path={base}/base", "stages=[sft,rollout,score]"]
    pipeline.run(made([*words, f"out={base}/start"]), QUIET)
    if hostile:
        pipeline.run(made([*words, f"out={base}/earlier", f"sft.total_steps={EARLIER}"]), QUIET)
    fit = [*shared_words(base, seed), f"model.path={base}/start/sft/model", "stages=[train]"]
    fit += [f"data.train_files={base}/start/score/trajectories.parquet", f"out={base}/fit"]
    pipeline.run(made([*fit, "trainer.total_training_steps=1", "trainer.val_before_train=false"]), QUIET)
    measured = base / "start.json"
    if not measured.exists():
        measured.write_text(json.dumps(accuracy(base, seed, base / "start" / "sft" / "model")))
    return base


def write_unseen(data: Path) -> None:
    """Test problems that stand in none of the other files: more than the demo's 500."""
    seen = set()
    for name in ("prompts", "dev", "demonstrations"):
        for _, row in read_rows(str(data / f"{name}.parquet")):
            asked = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]
            a, b = asked.rstrip("=").split("+")
            seen.add((int(a), int(b)))
    found = addition.problems(TEST, TEST_SEED, seen)
    rows = [addition.prompt_row(a, b, "unseen", index) for index, (a, b) in enumerate(found)]
    write_rows(data / "unseen.parquet", rows, PROMPTS)


def accuracy(base: Path, seed: int, model: Path) -> float:
    """Greedy, on the test problems, by the truth; NaN for a model with weights that are not finite."""
    actor = load_actor(str(model))
    if not all(p.isfinite().all() for p in actor.model.parameters()):
        return math.nan
    recipe = made(shared_words(base, seed))
    encoder = encoder_of(actor, recipe)
    prompts = load_prompts(str(base / "data" / "unseen.parquet"), encoder, recipe.data).rows
    engine = HfEngine(actor.model, actor.tokenizer, actor.stop_ids, batch_size=500)
    judge = Validator(engine, TRUTH, None, prompts, decode=encoder.decode_response, max_new_tokens=48)
    return judge.measure()["val/score"]


def world(base: Path, seed: int) -> World:
    recipe = made(shared_words(base, seed))

    @functools.cache
    def earlier() -> Actor:
        return load_actor(f"{base}/earlier/sft/model")

    encoder = encoder_of(load_actor(f"{base}/start/sft/model"), recipe)

    def rows_of(name: str) -> Rows:
        file = f"{base}/{name}/score/trajectories.parquet"
        return load_trajectories(file, encoder, recipe.data, scored=True).rows

    return World(rows_of("start"), lambda: rows_of("earlier"), earlier)


def run(out: Path, seed: int, name: str, guards: str) -> dict[str, Any]:
    """One training run and the accuracy of what it ends with; kept in result.json."""
    base = out / f"seed{seed}"
    folder = base / guards / name.replace(" ", "_").replace(",", "")
    done = folder / "result.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    shutil.rmtree(folder, ignore_errors=True)
    setup = SETUPS.get(name, Setup())
    found: dict[str, Any] = {"setup": name, "seed": seed, "guards": guards}
    started = time.monotonic()
    found |= hostile_run(recipe_for(base, seed, folder, name, setup, guards), setup, f"{seed} {name}")
    found["seconds"] = round(time.monotonic() - started, 1)
    start = json.loads((base / "start.json").read_text())
    last = folder / "train" / "last"
    end = accuracy(base, seed, last) if last.exists() else start
    found |= {"start": start, "end": None if math.isnan(end) else end}
    found["actions"] = actions(folder / "train" / "journal.jsonl")
    shutil.rmtree(folder / "train" / "snapshots", ignore_errors=True)
    done.write_text(json.dumps(found))
    return found


def recipe_for(base: Path, seed: int, folder: Path, name: str, setup: Setup, guards: str) -> Recipe:
    file = base / "start" / "score" / "trajectories.parquet"
    if setup.rows is not None:
        file = folder / "rows.parquet"
        rows = setup.rows(world(base, seed), random.Random(f"{seed} {name} rows"))
        write_rows(file, [trajectory_row(row) for row in rows], TRAJECTORIES)
    words = [*shared_words(base, seed), f"out={folder}", f"model.path={base}/start/sft/model"]
    words += ["stages=[train]", f"data.train_files={file}"]
    if setup.fitted:
        words.append(f"critic.model.path={base}/fit/train/critic")
    if guards == "off" and "preset" in Guards.model_fields:
        words.append("guards.preset=off")
    own = {word.partition("=")[0] for word in setup.words}
    return made([*words, *(word for word in HEALTHY if word.partition("=")[0] not in own), *setup.words])


def hostile_run(recipe: Recipe, setup: Setup, seed: str) -> dict[str, Any]:
    """The train stage with the fault in its job; how it came to its end."""

    def opened(recipe: Recipe, console: Console) -> Job:
        job = open_job(recipe, console)
        if setup.fault is not None:
            setup.fault(job, random.Random(seed))
        return job

    try:
        with patch.object(train, "open_job", opened):
            pipeline.run_stage("train", recipe, QUIET)
    except GuardStop as error:
        return {"ended": "stopped", "why": str(error)}
    except (DataError, ConfigError) as error:
        return {"ended": "refused", "why": str(error)}
    except (ReinError, RuntimeError, ValueError, ArithmeticError) as error:
        return {"ended": "failed", "why": f"{type(error).__name__}: {error}"}
    return {"ended": "done"}


def actions(journal: Path) -> dict[str, int]:
    """How often each action was taken, by rule and action."""
    if not journal.exists():
        return {}
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return dict(Counter(line["action"] for line in lines if line.get("kind") == "verdict"))


def tasks(arguments: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Seed, set-up and guards of every run, the healthy ones first."""
    healthy = sorted({*arguments.seeds, *arguments.healthy_seeds})
    names = [(name, arguments.seeds) for name in arguments.setups]
    for name, seeds in [(HEALTHY_NAME, healthy), *names]:
        yield from ((seed, name, guards) for seed in seeds for guards in arguments.guards)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--healthy-seeds", type=int, nargs="*", default=list(range(10)))
    parser.add_argument("--setups", nargs="*", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--guards", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    out, runs = arguments.out, []
    wanted = list(tasks(arguments))
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        bases = {
            seed: pool.submit(make_base, out, seed, seed in arguments.seeds)
            for seed in dict.fromkeys(seed for seed, _, _ in wanted)
        }
        for base in bases.values():
            base.result()
        for task in [pool.submit(run, out, *each) for each in wanted]:
            runs.append(task.result())
            print(json.dumps(runs[-1]), flush=True)
    for each in runs:
        if "why" in each:
            each["why"] = each["why"].replace(f"{out}/", "")
    if not arguments.no_report:
        report(runs, (__doc__ or "").split("\n\n")[2])


if __name__ == "__main__":
    main()
