"""Offline PPO: stored trajectories in, a better actor out. The loop of the whole project, on a page.

Reads scored trajectories; writes train/{best,last,critic}, snapshots, metrics.jsonl and manifest.json. The
updates need no generation; validation does. What the loop stands on is opened in train_open.py and held in
train_job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from rein.config.guards import Rule
from rein.config.recipe import Recipe
from rein.errors import Interrupted, OutOfMemory, is_out_of_memory
from rein.guards.decide import GRAVITY
from rein.runtime.interrupt import Interrupt, deferred
from rein.runtime.memory import give_back_now
from rein.stages import token_records
from rein.stages.train_job import Job
from rein.stages.train_open import open_job
from rein.stages.train_reins import LEAVE
from rein.tables import nearest
from rein.tracking.console import Advance, Console
from rein.types import Action, Experience, Metrics, Update, Verdict

T = TypeVar("T")


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train to the end of the recipe, from the newest snapshot where there is one."""
    job = open_job(recipe, console)
    try:
        with (
            deferred() as interrupt,
            console.progress(job.total_updates, "train", job.cursor.done) as advance,
        ):
            fit_critic(job, interrupt, advance)
            train(job, interrupt, advance)
        return job.finish()
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
    """The loop: experience, verdict, updates with theirs, then validate and save; where asked, go back."""
    reins = job.reins

    def between(experience: Experience | None = None) -> None:
        leave_if(interrupt, job, experience)

    if not job.validated:
        verdict = job.validate_start(between)
        reins.start()
        obey(job, verdict, None, advance)
    job.maker.between = between
    job.log_times()  # what came before is no step's
    for experience in experiences(job):
        if job.cursor.batch == job.cursor.update == 0 and not reins.rollbacks:
            warn_of_strangers(job, experience.metrics)
        verdict = reins.after(experience.metrics)
        if verdict.action is Action.CONTINUE and not reins.anew:
            verdict = updates(job, experience, between, advance)
        else:
            job.log(experience.metrics)
        if verdict.action is Action.CONTINUE and not reins.anew:
            verdict = job.after_batch(len(experience.rows), partial(between, experience))
            if job.cursor.batch == 1:
                warn_of_unread(job)
        obey(job, verdict, experience, advance)
        reins.anew = False  # the rewards are clipped otherwise: what is left of the batch is made again
    if job.until < job.batches:
        every = Verdict(Action.REFRESH, f"trainer.refresh_every {job.recipe.trainer.refresh_every}")
        obey(job, every, None, advance)


def updates(
    job: Job, experience: Experience, between: Callable[[Experience | None], None], advance: Advance
) -> Verdict:
    """What is left of a batch's updates, each judged before it is applied and, where due, by the probe."""
    cursor, reins, verdict = job.cursor, job.reins, Verdict()
    plan, soft = job.updates_of(experience.rows, cursor.batch), reins.soft
    said = experience.metrics
    while verdict.action is Action.CONTINUE and not reins.anew and cursor.update < len(plan):
        verdict, metrics = one_update(job, plan[cursor.update], experience)
        metrics |= said | {"training/global_step": cursor.batch + 1}
        cursor.update, cursor.done, cursor.number = cursor.update + 1, cursor.done + 1, cursor.number + 1
        last, said = cursor.update == len(plan), {}
        if cursor.number % job.recipe.guards.probe_every == 0 and not last:
            probed = job.probed()
            verdict = graver(verdict, reins.after(probed))
            metrics |= probed
        job.log(metrics)
        advance(1, job.note(metrics))
        if verdict.action is Action.CONTINUE:
            kept = None if reins.anew else experience
            if not last:
                reins.keep(kept)
            between(kept)
        if reins.soft is not soft:  # as a resumed run would plan it: ppo_epochs may have changed
            plan, soft = job.updates_of(experience.rows, cursor.batch), reins.soft
    return verdict


def one_update(
    job: Job, update: Update, experience: Experience, phase: str | None = None
) -> tuple[Verdict, Metrics]:
    """Gradients, the guards' word on them, and the step or not; what is asked for beyond that."""
    learner, role = job.learner, update.role
    phase, rows = phase or f"update_{role}", [experience.rows[i] for i in update.rows]
    counts = bool(experience.response_mask[list(update.rows)].any())  # unless guards left all rows out
    if not rows:  # of an epoch that remedies took
        return Verdict(), {}
    if role in job.dropped or not counts:  # its schedule advances, so that it ends where the plan does
        learner.discard(role, len(rows))
        return Verdict(), {}
    with job.clock(phase, job.pace.work(role, rows)):
        metrics = within_memory(job, role, partial(learner.backward, update, experience))
    verdict = job.reins.before(metrics, rows)
    if verdict.action is Action.CONTINUE:
        with job.clock(phase):
            learner.apply(role)
        if not job.applied.get(role):  # Adam's moments have come to stay among what came and went
            give_back_now()
        job.applied[role] = job.applied.get(role, 0) + 1
        return verdict, metrics
    learner.discard(role)
    if verdict.action is Action.STOP_EPOCHS:
        job.dropped.add(role)
    settled = verdict.action in (Action.SKIP, Action.STOP_EPOCHS)
    return (Verdict() if settled else verdict), metrics


def obey(job: Job, verdict: Verdict, experience: Experience | None, advance: Advance) -> None:
    """What a verdict asks for between two updates. Raises GuardStop where the run ends here."""
    if verdict.action is Action.ROLLBACK:
        done = job.cursor.done
        job.reins.rollback(verdict)
        advance(job.cursor.done - done)
    elif verdict.action in LEAVE:
        job.save(experience, point=False)
        job.reins.leave(verdict.action, verdict.reason)


def graver(one: Verdict, other: Verdict) -> Verdict:
    """The graver of two verdicts."""
    return max(one, other, key=lambda verdict: GRAVITY.index(verdict.action))


def experiences(job: Job) -> Iterator[Experience]:
    """A batch after the other from the cursor on; the one a snapshot was taken in is the stored one."""
    while job.cursor.batch < job.until:
        job.profiler.step(job.cursor.batch + 1)
        kept, job.kept_experience = job.kept_experience, None
        rows, coef = job.rows_of(job.cursor.batch), job.learner.softened(job.learner.kl_coef_in_reward)
        made = kept or within_memory(job, None, partial(job.maker.make, rows, coef))
        if kept is None:
            token_records.record(job, made)
        yield made


def within_memory(job: Job, role: str | None, work: Callable[[], T]) -> T:
    """Do the work; where memory runs out, again with half the token budget and the same random numbers."""
    drawn = torch.get_rng_state()
    while True:
        try:
            return work()
        except Exception as error:
            if "could not create a primitive" in str(error):
                raise OutOfMemory(
                    "train: oneDNN could not make a kernel, most likely for want of memory, and makes no "
                    "other in this process; the same command goes on from the newest snapshot: give a lower "
                    "actor.ppo_max_token_len_per_gpu"
                ) from error
            if not is_out_of_memory(error) or not job.team.alone:  # other ranks wait amid a pass
                raise
            if role is not None:
                job.learner.forget(role)
            torch.set_rng_state(drawn)
            job.reins.halve_budget(job.longest, error)


def warn_of_strangers(job: Job, metrics: Metrics) -> None:
    """Say so where the stored log-probs are far from what the start policy gives the same tokens."""
    mean = metrics.get("rollout_corr/raw_mean", 1.0)
    if not 0.5 < mean < 2:
        job.console.say(
            f"warning: the start policy gives stored tokens {mean:.3g} times their stored probability on "
            "average; was another model, template or temperature used to write them?"
        )


def warn_of_unread(job: Job) -> None:
    """Say so where a rule of the recipe's own has read nothing in a whole batch: a metric misspelled."""
    own = {rule.metric for rule in job.recipe.guards.rules if isinstance(rule, Rule)}
    late = job.last.keys() | {metric for metric in own if metric and metric.startswith("val/")}
    for metric in sorted(metric for metric in own if metric and metric not in late):
        where = f"warning: guards.rules: {metric} was not there in the first batch"
        job.console.say(f"{where}; {nearest(metric, job.last)}")


def fit_critic(job: Job, interrupt: Interrupt, advance: Advance) -> None:
    """Fit V to the stored returns before the actor moves, until it explains enough of the held-out ones."""
    if job.cursor.fitted < job.fit_steps and job.reins.good is None:
        job.reins.start()
    while job.cursor.fitted < job.fit_steps:
        cursor = job.cursor
        experience = job.fit_batch(cursor.fitted)
        verdict, metrics = one_update(job, job.fit_update(experience), experience, "critic_fit")
        cursor.fitted, cursor.done, cursor.number = cursor.fitted + 1, cursor.done + 1, cursor.number + 1
        if cursor.fitted % job.recipe.guards.probe_every == 0 or cursor.fitted == job.fit_steps:
            explained = job.held_out_explained_variance()
            measured = {"critic/vf_explained_var": explained}
            verdict = graver(verdict, job.reins.after(measured))
            metrics |= measured
            if explained >= job.recipe.critic.fit_until:
                job.end_fit()
        job.log(metrics)
        advance(1, job.note(metrics), total=job.total_updates)
        obey(job, verdict, None, advance)
        job.reins.anew = False  # the next mini-batch's returns are clipped otherwise
        job.dropped.clear()
        if verdict.action is Action.CONTINUE:
            if cursor.fitted < job.fit_steps:
                job.reins.keep(None)
            leave_if(interrupt, job, None)


def leave_if(interrupt: Interrupt, job: Job, experience: Experience | None) -> None:
    """After Ctrl-C or SIGTERM: save between two updates and say how to go on."""
    if interrupt:
        job.save(experience, point=False)  # a run that is not broken off has no such point
        raise Interrupted(
            f"train: stopped after update {job.cursor.done} of {job.total_updates}, state saved; "
            "the same command goes on from here",
            interrupt.signal_number,
        )
