"""Offline PPO: stored trajectories in, a better actor out. The loop of the whole project, on a page.

Reads scored trajectories; writes train/{best,last,critic}, snapshots, metrics.jsonl and manifest.json. The
updates need no generation; validation does. What the loop stands on is opened in train_open.py and held in
train_job.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rein.config.recipe import Recipe
from rein.errors import GuardStop, Interrupted
from rein.guards.decide import decide
from rein.runtime.interrupt import Interrupt, deferred
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.tracking.console import Advance, Console
from rein.types import Action, Experience, Metrics


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train to the end of the recipe, from the newest snapshot where there is one."""
    started = time.monotonic()
    job = open_job(recipe, console)
    try:
        with deferred() as interrupt, console.progress(job.total_updates, "train") as advance:
            advance(job.cursor.number)
            fit_critic(job, interrupt, advance)
            train(job, interrupt, advance)
        return job.finish(time.monotonic() - started)
    finally:
        job.close()


def rehearse(recipe: Recipe, console: Console) -> Metrics:
    """Two updates of each role on 16 of the real rows, thrown away: the rehearsal before the big run."""
    job = open_job(recipe, console, rehearsal=True)
    metrics: Metrics = {}
    try:
        experience = job.maker.make(job.train_rows[:16], job.learner.kl_coef_in_reward)
        metrics |= experience.metrics
        seen: dict[str, int] = {}
        for update in job.updates_of(experience.rows, 0):
            if seen.get(update.role, 0) < 2:
                seen[update.role] = seen.get(update.role, 0) + 1
                metrics |= job.learner.backward(update, experience)
                job.learner.apply(update.role)
        return metrics
    finally:
        job.close()


def train(job: Job, interrupt: Interrupt, advance: Advance) -> None:
    """The loop: experience, updates, verdict, apply or not, probe, validate, save."""
    learner, cursor = job.learner, job.cursor
    if not job.validated:
        job.validate_start()
    for experience in experiences(job):
        batch_metrics = experience.metrics
        if cursor.batch == 0 and cursor.update == 0:
            warn_of_strangers(job, batch_metrics)
        for update in job.updates_of(experience.rows, cursor.batch)[cursor.update :]:
            metrics = learner.backward(update, experience) | batch_metrics
            batch_metrics = {}
            act(job, update.role, metrics, experience)
            cursor.update, cursor.number = cursor.update + 1, cursor.number + 1
            if cursor.number % job.recipe.guards.probe_every == 0:
                metrics |= job.probe.measure()
            job.log(metrics | {"training/global_step": cursor.batch + 1})
            advance(1, job.note(metrics))
            leave_if(interrupt, job, experience)
        cursor.batch, cursor.update = cursor.batch + 1, 0
        job.after_batch(len(experience.rows))


def experiences(job: Job) -> Iterator[Experience]:
    """A batch after the other from the cursor on; the one a snapshot was taken in is the stored one."""
    while job.cursor.batch < job.batches:
        kept, job.kept_experience = job.kept_experience, None
        yield kept or job.maker.make(job.rows_of(job.cursor.batch), job.learner.kl_coef_in_reward)


def warn_of_strangers(job: Job, metrics: Metrics) -> None:
    """Say so where the stored log-probs are far from what the start policy gives the same tokens."""
    mean = metrics.get("rollout_corr/raw_mean", 1.0)
    if not 0.5 < mean < 2:
        job.console.say(
            f"warning: the start policy gives stored tokens {mean:.3g} times their stored probability on "
            "average; was another model, template or temperature used to write them?"
        )


def act(job: Job, role: str, metrics: Metrics, experience: Experience | None) -> None:
    """Ask the guards before the weights move, and do what they say."""
    verdict = decide(job.before_apply, metrics)
    if verdict.action is Action.CONTINUE:
        job.learner.apply(role)
        job.applied[role] = job.applied.get(role, 0) + 1
        return
    job.skipped += 1
    metrics["guard/skipped"] = job.skipped
    job.console.say(
        f"guard: update {job.cursor.number + 1} ({role}) {verdict.action.value}: {verdict.reason}"
    )
    if verdict.action is not Action.SKIP:
        job.save(experience)
        raise GuardStop(f"train: {verdict.reason}; the state before is saved in {job.snapshots.folder}")
    job.learner.discard(role)


def fit_critic(job: Job, interrupt: Interrupt, advance: Advance) -> None:
    """Fit V to the stored returns before the actor moves, until it explains enough of the held-out ones."""
    cursor = job.cursor
    while cursor.fitted < job.fit_steps:
        experience = job.fit_batch(cursor.fitted)
        update = job.fit_update(experience)
        metrics = job.learner.backward(update, experience)
        act(job, "critic", metrics, None)
        cursor.fitted, cursor.number = cursor.fitted + 1, cursor.number + 1
        if cursor.fitted % job.recipe.guards.probe_every == 0 or cursor.fitted == job.fit_steps:
            metrics["critic/vf_explained_var"] = explained = job.held_out_explained_variance()
            if explained >= job.recipe.critic.fit_until:
                job.end_fit()
        job.log(metrics)
        advance(1, job.note(metrics))
        leave_if(interrupt, job, None)


def leave_if(interrupt: Interrupt, job: Job, experience: Experience | None) -> None:
    """After Ctrl-C or SIGTERM: save between two updates and say how to go on."""
    if interrupt:
        job.save(experience)
        raise Interrupted(
            f"train: stopped after update {job.cursor.number} of {job.total_updates}, state saved; "
            "the same command goes on from here",
            interrupt.signal_number,
        )
