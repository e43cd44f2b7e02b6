"""Stored answers and twenty policies on the way from who wrote them, for off_policy_evaluation.py.

A task has a behavior policy, checkpoints of a PPO run on its answers, the true score of each, and a pool of
held-out answers sampled from the behavior policy. Equal answers are held once: what a policy says of them is
computed once. Walks: the behavior policy is the start policy of random_walks.py, which gives every token
some probability, and scores are exact. Demo: the behavior policy is the demo's SFT model; the true score on
the pool's prompts is the sum of probability times score over all answers in the pool, and for all others the
mean of what is sampled from the policy itself.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import walks
from demo_controls import shared_words
from walks import STARTS, Mover, exact, sample
from walks_run import DEFAULT, QUIET, SHORT, drive, logged_walks, recipe_of, stored, words_of

from rein.commands import demo
from rein.commands.demo import recipe_of as demo_recipe
from rein.data.addition import TEST_SEED, problems, prompt_row
from rein.data.loader import load_prompts
from rein.data.parquet import read_rows, write_rows
from rein.data.schemas import PROMPTS
from rein.engines.hf import HfEngine
from rein.experience import in_micro_batches, padded
from rein.functional.masked import masked_sum
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.rewards import build
from rein.stages import train
from rein.stages.tokens import encoder_of
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.types import Metrics, Trajectory
from rein.validator import answer, scored

walks.PRUNED = 1e-8  # what is cut off an exact score stays below 1e-4
CHECKPOINTS = 20
BUDGET = 16384  # tokens of a forward pass
OWN_ANSWERS = 4  # of a policy to each prompt of the demo's pool, for its true score


@dataclass
class Pool:
    """Answers of the behavior policy. A answers, no two alike, to P prompts; K policies."""

    drawn: list[Tensor]  # of each prompt, the answers it drew, with repeats
    behavior: Tensor  # [A, T] log-probs
    actors: Tensor  # [K, A, T]
    values: Tensor  # [A, T] of a critic fitted to other answers of the behavior policy
    scores: Tensor  # [A]
    mask: Tensor  # [A, T]
    truth: list[float]  # [K]
    error: list[float]  # [K] of `truth`: probability that was not followed, or the standard error
    names: list[str]  # [K]


class Keeper:
    """Stands in the training job where the validator stands; writes the actor after chosen batches."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.places = job, folder, spaced(job.batches)

    def measure(self, advance: Any = None) -> Metrics:
        place = self.job.cursor.batch + 1
        if place in self.places:
            torch.save(self.job.actor.model.state_dict(), self.folder / f"{place:03}.pt")
        return {}


def trained(recipe: Any, folder: Path) -> dict[int, dict[str, Tensor]]:
    """The actor after CHECKPOINTS batches of a training run, by batch, and its critic; made once."""
    if not (folder / "critic" / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        job = open_job(recipe, QUIET)
        job.validator = Keeper(job, folder)  # type: ignore[assignment]
        drive(job, train.fit_critic, train.train)
        assert job.critic is not None
        job.critic.save(folder / "critic")
    return {int(file.stem): torch.load(file) for file in sorted(folder.glob("*.pt"))}


def spaced(count: int) -> list[int]:
    """CHECKPOINTS of 1 to `count`: every one at first, then further and further apart."""
    places = np.geomspace(1, count, CHECKPOINTS)
    for i in range(1, CHECKPOINTS):
        places[i] = max(round(places[i]), places[i - 1] + 1)
    return [min(int(place), count) for place in places]


def read(actor: Actor, kept: list[dict[str, Tensor]], rows: list[Trajectory]) -> Tensor:
    """[K, A, T] log-probs of the policies."""
    found = []
    for state in kept:
        actor.model.load_state_dict(state)
        found.append(in_micro_batches(rows, BUDGET, lambda some, temp: actor.log_probs(some, temp)[0]))
    return torch.stack(found)


def distinct(rows: list[Trajectory]) -> tuple[list[Trajectory], Tensor]:
    """The rows without repeats, and where each of the given ones is among them."""
    places: dict[str, int] = {}
    firsts, found = [], []
    for row in rows:
        key = row.key
        if key not in places:
            places[key] = len(places)
            firsts.append(row)
        found.append(places[key])
    return firsts, torch.tensor(found)


def pooled(
    rows: list[Trajectory],
    found: Tensor,
    asked: Tensor,
    start: Actor,
    kept: list[dict[str, Tensor]],
    critic: Path,
) -> Pool:
    """What start policy, policies and critic say of the distinct rows; `asked`: the prompt of each draw."""
    behavior = in_micro_batches(rows, BUDGET, lambda some, temp: start.log_probs(some, temp)[0])
    judge = load_critic(str(critic))
    values = in_micro_batches(rows, BUDGET, lambda some, _: judge.values(some))
    return Pool(
        drawn=[found[asked == prompt] for prompt in range(int(asked.max()) + 1)],
        behavior=behavior,
        actors=read(start, kept, rows),
        values=values,
        scores=torch.tensor([row.score for row in rows], dtype=torch.float64),
        mask=padded([row.response_mask for row in rows], torch.bool),
        truth=[],
        error=[],
        names=[],
    )


def walks_pool(out: Path, seed: int, answers: int = 200_000) -> Pool:
    """Walks of the start policy on a graph; checkpoints of the default method, one update apart at first."""
    data = logged_walks(SHORT, seed, out)
    start = load_actor(str(data.start))
    rows, _ = sample(Mover(start.model), data.graph, SHORT.walks, seed + 1000)
    own = stored(SHORT, data.graph, data.folder / "own", rows, data.start)
    changed = ("data.train_batch_size", "trainer.total_training_steps", "trainer.test_freq")
    words = [word for word in words_of(DEFAULT, own) if not word.startswith(changed)]
    words += ["data.train_batch_size=126", "trainer.total_training_steps=96", "trainer.test_freq=1"]
    words += ["actor.optim.lr=3e-4"]
    kept = trained(recipe_of(own.folder / "run", own.start, words), own.folder / "kept")
    drawn, _ = sample(Mover(start.model), data.graph, answers, seed + 2000)
    rows, found = distinct(drawn)
    asked = torch.tensor([int(row.prompt_ids[0]) for row in drawn]) - int(STARTS[0])
    pool = pooled(rows, found, asked, start, list(kept.values()), own.critic)
    for place, state in kept.items():
        start.model.load_state_dict(state)
        scored = exact(Mover(start.model), data.graph)
        pool.truth.append(scored["val/score"])
        pool.error.append(scored["val/pruned"])
        pool.names.append(f"update {place}")
    return pool


def demo_pool(out: Path, prompts: int = 1000, answers: int = 32) -> Pool:
    """Answers of the demo's SFT model to problems that nothing was trained on; checkpoints of its PPO."""
    demo.run([f"out={out}", "seed=0", "stages=[sft,rollout,score]"], QUIET)
    own = ["data.train_batch_size=128", "trainer.test_freq=1", "trainer.val_before_train=false"]
    own += ["guards.preset=off", "trainer.logger=[jsonl]", "stages=[train]"]
    words = [f"out={out / 'ppo'}", "seed=0", "reward=exact", *shared_words(out), *own]
    recipe, _ = demo_recipe([*words, f"data.train_files={out}/score/trajectories.parquet"])
    kept = trained(recipe, out / "kept")
    start = load_actor(f"{out}/sft/model")
    encoder = encoder_of(start, recipe)
    trained_on = {_problem(row) for _, row in read_rows(out / "data/prompts.parquet")}
    asked = problems(prompts, TEST_SEED + 1, trained_on)
    write_rows(out / "pool.parquet", [prompt_row(*p, "pool", i) for i, p in enumerate(asked)], PROMPTS)
    given = load_prompts([f"{out}/pool.parquet"], encoder, recipe.data).rows
    reward = build(recipe.score.reward, scorer=None)

    def sampled(n: int, seed: int) -> list[Trajectory]:
        engine = HfEngine(start.model, start.tokenizer, start.stop_ids, batch_size=512)
        some = answer(
            engine, given, n=n, temperature=1.0, max_new_tokens=48, seed=seed, decode=encoder.decode_response
        )
        return scored([row for rows in some for row in rows], reward)

    rows, found = distinct(sampled(answers, 1))
    drawn = torch.arange(prompts).repeat_interleave(answers)
    pool = pooled(rows, found, drawn, start, list(kept.values()), out / "kept" / "critic")
    number = {prompt.where: i for i, prompt in enumerate(given)}
    prompt_of, known = torch.tensor([number[row.where] for row in rows]), {row.key for row in rows}
    for (place, state), log_probs in zip(kept.items(), pool.actors, strict=True):
        start.model.load_state_dict(state)
        chance = masked_sum(log_probs.double(), pool.mask, 1).exp()
        within = torch.zeros(prompts, dtype=torch.float64).index_add_(0, prompt_of, chance * pool.scores)
        others = [(row.score or 0.0) * (row.key not in known) for row in sampled(OWN_ANSWERS, 2)]
        beyond = torch.tensor(others, dtype=torch.float64)
        pool.truth.append((within.mean() + beyond.mean()).item())
        pool.error.append((beyond.std() / len(beyond) ** 0.5).item())
        pool.names.append(f"update {place}")
    return pool


def _problem(row: dict[str, Any]) -> tuple[int, int]:
    a, _, b = row["prompt"][0]["content"].rstrip("=").partition("+")
    return int(a), int(b)


def pool_of(name: str, out: Path) -> Pool:
    """The pool of a task, made once: "walks 10", "walks 11" or "demo"."""
    file = out / f"{name.replace(' ', '')}.pt"
    if not file.exists():
        made = demo_pool(out / "demo") if name == "demo" else walks_pool(out / "walks", int(name.split()[1]))
        torch.save(made, file)
    found: Pool = torch.load(file, weights_only=False)
    return found
