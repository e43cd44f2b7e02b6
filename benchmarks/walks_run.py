"""The methods compared on stored walks, and one training run: rows and a recipe in, what came of it out.

Training is Rein's own train stage, with the task's score in its validator's place. Every method of a graph
begins with the same start policy, the same critic (fitted once to the stored returns) and the same rows, and
makes the same number of actor updates on mini-batches of like size. What is done stands in `runs.jsonl` of
the graph's folder and is not repeated.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from walks import LETTERS, AtRandom, Graph, make_graph, measure, sample

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.groups import pairs
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import ConfigError
from rein.experience import in_micro_batches, padded
from rein.functional.kl import off_policy_kl
from rein.functional.masked import masked_mean
from rein.functional.staleness import staleness
from rein.models.actor import Actor, load_actor
from rein.models.tiny import make_tiny
from rein.runtime.interrupt import Interrupt, deferred
from rein.stages import pipeline, train
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.types import Metrics, Trajectory

QUIET = Console(quiet=True)
DEFAULT = "decoupled PPO (default)"
METHODS: dict[str, list[str]] = {
    "behavior cloning": ["algorithm.method=bc"],
    "filtered cloning (top 25 %)": ["algorithm.method=filtered_bc"],
    "DPO": ["algorithm.method=dpo"],
    "PPO anchored to the logged policy": ["algorithm.rollout_correction.preset=bypass_ppo_clip"],
    "PPO ignoring it": ["algorithm.rollout_correction.rollout_is=null"],
    "PPO ignoring it, without KL": [
        "algorithm.rollout_correction.rollout_is=null",
        "actor.use_kl_loss=false",
    ],
    DEFAULT: [],
    "decoupled PPO, KL of k3_soft": ["actor.kl_loss_type=k3_soft"],
    "decoupled PPO, exact KL": ["actor.kl_loss_type=full"],
    "decoupled PPO without KL": ["actor.use_kl_loss=false"],
    "TOPR": ["algorithm.method=topr", "actor.use_kl_loss=false"],  # both without KL, as published
    "AWR": ["algorithm.method=awr", "actor.use_kl_loss=false"],
    "V-trace": ["algorithm.adv_estimator=vtrace"],
}
PAIRED = {"DPO"}  # learns from pairs, which the train stage makes of the best and worst walks of a start node
FILTERED = {"filtered cloning (top 25 %)"}
RATES = (3e-4, 1e-3, 3e-3)  # the grid: actor.optim.lr, the same for every method


@dataclass(frozen=True)
class Task:
    """Sizes that every method shares."""

    name: str
    long: bool
    walks: int  # stored
    mini: int  # rows per update
    updates: int
    sft_batch: int
    sft_steps: int
    fit_steps: int  # of the critic
    measured: int = 4  # times in a run


SHORT = Task("short", False, 1000, 125, 96, sft_batch=125, sft_steps=150, fit_steps=100)
LONG = Task("long", True, 300, 50, 60, sft_batch=25, sft_steps=100, fit_steps=60)


@dataclass(frozen=True)
class Stored:
    """The data of a graph and the models that training begins with."""

    task: Task
    graph: Graph
    folder: Path
    rows: list[Trajectory]
    start: Path
    critic: Path
    logged: float  # mean score of the stored walks
    begun: dict[str, float]  # the start policy's score, invalid moves, and distance from who wrote the walks


def logged_walks(task: Task, seed: int, out: Path) -> Stored:
    """Walks at random over the edges, and a GPT of 2 layers and width 64 taught to walk like that."""
    graph = make_graph(seed, long=task.long)
    folder = out / f"{task.name}{seed}"
    rows, _ = sample(AtRandom(graph), graph, task.walks, seed)
    write_rows(folder / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES)
    start = folder / "sft" / "model"
    if not (start / "config.json").exists():
        base = make_tiny(folder / "base", seed=seed, hidden=64, layers=2, characters=LETTERS)
        words = [
            "stages=[sft]",
            f"sft.files={folder}/rows.parquet",
            f"sft.batch_size={task.sft_batch}",
            f"sft.total_steps={task.sft_steps}",
            "sft.optim={lr: 2e-2, lr_scheduler_type: cosine, lr_warmup_steps: 20}",
        ]
        pipeline.run(recipe_of(folder, base, words), QUIET)
    return stored(task, graph, folder, rows, start)


def stored(task: Task, graph: Graph, folder: Path, rows: list[Trajectory], start: Path) -> Stored:
    """Rows beside the critic fitted to them, from the start policy on."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES)
    critic = folder / "critic"
    if not (critic / "config.json").exists():
        words = [*schedule(task, folder, len(rows)), f"trainer.critic_warmup={task.fit_steps}"]
        job = open_job(recipe_of(folder / "fit", start, words), QUIET)
        drive(job, train.fit_critic)
        assert job.critic is not None
        job.critic.save(critic)
        shutil.rmtree(folder / "fit")
    actor = load_actor(str(start))
    begun = measure(actor.model, graph) | distance(actor, rows)
    return Stored(task, graph, folder, rows, start, critic, mean([row.score or 0.0 for row in rows]), begun)


def recipe_of(out: Path, start: Path, words: Sequence[str]) -> Recipe:
    """What all runs share, and the words of one. Raises ConfigError for what is not built yet."""
    shared = [
        f"out={out}",
        f"model.path={start}",
        "threads=1",
        "data.max_prompt_length=4",
        "data.max_response_length=101",
        "data.holdout_fraction=0",
        "critic.optim.lr=1e-3",
        "trainer.val_before_train=false",
        "guards.preset=off",
        "trainer.logger=[jsonl]",
    ]
    return load(None, [*shared, *words])[0]


def schedule(task: Task, folder: Path, rows: int) -> list[str]:
    """All rows are one batch: old log-probs, values and advantages are made anew after each pass."""
    per_pass = max(round(rows / task.mini), 1)
    mini = -(-rows // per_pass)
    passes = -(-task.updates // per_pass)
    return [
        f"data.train_files={folder}/rows.parquet",
        f"data.train_batch_size={rows}",
        f"actor.ppo_mini_batch_size={min(mini + mini % 2, rows)}",  # even: dpo's rows come in pairs
        "actor.ppo_epochs=1",
        f"trainer.total_training_steps={passes}",
        f"trainer.test_freq={max(passes // task.measured, 1)}",
    ]


def words_of(method: str, data: Stored) -> list[str]:
    """A method's words beside the schedule for the rows that it trains on."""
    count, own = len(data.rows), []
    if method in FILTERED:
        scores = sorted((row.score or 0.0 for row in data.rows), reverse=True)
        threshold = scores[len(scores) // 4 - 1] or min(score for score in scores if score > 0)
        count = sum(score >= threshold for score in scores)
        own = [f"algorithm.filter_threshold={threshold!r}"]
    if method in PAIRED:
        count = len(pairs(data.rows))
    start = [f"critic.model.path={data.critic}", "trainer.critic_warmup=0"]
    return [*schedule(data.task, data.folder, count), *start, *METHODS[method], *own]


class Scores:
    """Stands in the training job where the validator stands; keeps what it measured."""

    def __init__(self, actor: Actor, graph: Graph) -> None:
        self.actor, self.graph = actor, graph
        self.curve: list[Metrics] = []

    def measure(self, advance: Callable[[int], None] | None = None) -> Metrics:
        self.curve.append(measure(self.actor.model, self.graph))
        return self.curve[-1]


def drive(job: Job, *loops: Callable[[Job, Interrupt, Callable[..., None]], None]) -> None:
    try:
        with deferred() as interrupt:
            for loop in loops:
                loop(job, interrupt, lambda steps=1, note="", total=None: None)
    finally:
        job.close()


def one_run(data: Stored, method: str, rate: float) -> dict[str, Any]:
    """Train; final and best score, invalid moves, distance from who wrote the rows, CPU seconds."""
    started, out = time.process_time(), data.folder / f"run-{method.replace(' ', '_')}"
    recipe = recipe_of(out, data.start, [*words_of(method, data), f"actor.optim.lr={rate}"])
    shutil.rmtree(out, ignore_errors=True)
    job = open_job(recipe, QUIET)
    scores = Scores(job.actor, data.graph)
    job.validator = scores  # type: ignore[assignment]
    drive(job, train.train)
    shutil.rmtree(out)
    curve = [point["val/score"] for point in scores.curve]
    return {
        "method": method,
        "rate": rate,
        "final": curve[-1],
        "best": max(curve),
        "invalid": scores.curve[-1]["val/invalid"],
        "curve": [round(score, 4) for score in curve],
        "updates": job.learner.optimizers["actor"].step,
        **distance(job.actor, data.rows),
        "seconds": round(time.process_time() - started, 2),
    }


def distance(actor: Actor, rows: list[Trajectory]) -> dict[str, float]:
    """How far a policy is from who wrote the rows: raw weights of whole walks, and KL(actor || behavior)."""
    mask = padded([row.response_mask for row in rows], torch.bool)
    now = in_micro_batches(rows, 4096, lambda some, temperature: actor.log_probs(some, temperature)[0])
    behavior = padded(
        [row.behavior_log_probs for row in rows if row.behavior_log_probs is not None], now.dtype
    )
    found = staleness(now, behavior, mask)
    return {
        "ess": found["seq_ess"],
        "mean_weight": found["seq_mean"],
        "kl_behavior": masked_mean(off_policy_kl(now, behavior, behavior), mask).item(),
    }


class Runs:
    """What is done, one JSON line a run; what was refused is not kept."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "runs.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def find(self, method: str, rate: float) -> dict[str, Any] | None:
        return next((row for row in self.rows if (row["method"], row["rate"]) == (method, rate)), None)

    def run(self, data: Stored, method: str, rate: float) -> dict[str, Any] | None:
        """The run, made now or before; None where the recipe is refused, and why is printed."""
        found = self.find(method, rate)
        if found is not None:
            return found
        name = f"{data.folder.name} {method}, rate {rate:g}"
        try:
            found = one_run(data, method, rate)
        except ConfigError as error:
            print(f"{name}: REFUSED, {error}", flush=True)
            return None
        self.rows.append(found)
        with self.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        shown = " ".join(
            f"{key} {found[key]:.3f}" for key in ("final", "best", "invalid", "ess", "mean_weight")
        )
        print(f"{name}: {shown} ({found['seconds']:.1f} s)", flush=True)
        return found


T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)  # by n - 2


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of a mean over graphs; without width for a single one."""
    n, center = len(values), mean(values)
    if n == 1:
        return center, center
    spread = math.sqrt(sum((value - center) ** 2 for value in values) / (n - 1))
    half = T975[n - 2] * spread / math.sqrt(n)
    return center - half, center + half
