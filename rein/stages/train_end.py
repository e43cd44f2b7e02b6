"""What a training run leaves that went to its end: models, facts for its manifest, its summary.

Part of stages/train.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.drafts import twin_folder
from rein.errors import CheckpointError, GuardStop, RefreshAsked
from rein.stages import rounds, train_pace
from rein.stages.tokens import FACT

if TYPE_CHECKING:
    from rein.stages.train_job import Job

NOT_ABLE = (
    "this recipe cannot have them scored (score among its stages) or written (rollout.engine hf or vllm); "
    "the same command goes on with the rows it has"
)
SHOWN = (
    "val/score",
    "val/proxy_score",
    "ope/score",
    "ope/low",
    "probe/kl_reference",
    "probe/entropy",
    "critic/vf_explained_var",
)


def end(job: Job) -> dict[str, Any]:
    """Write last, critic, and best where nothing could be validated; the facts for the manifest.

    Raises GuardStop where every update of a role was skipped: what would be written is the start.
    """
    for role in job.learner.roles:
        if not job.applied.get(role):
            raise GuardStop(
                f"train: all updates of the {role} were skipped, as not finite or by a guard; see "
                "train/journal.jsonl, and check scores and learning rates"
            )
    with job.clock("save_checkpoint"):
        if job.critic is not None:
            job.team.files.save("critic", job.folder / "critic")
        job.team.files.save("actor", job.folder / "last")
        if not job.best:
            _same(job.folder / "last", job.folder / "best")
    job.log_times()
    speed = job.pace.summary()
    train_pace.say(speed, job.console)
    audited = {} if job.audited is None else {"audit": job.audited.as_json()}
    return {
        **audited,
        "rows": job.rows.counts,
        "token_budget": job.recipe.actor.token_budget,
        FACT: job.rows.marks,
        "updates": job.cursor.number,
        "skipped_updates": job.reins.skipped,
        "rollbacks": job.reins.rollbacks,
        "best": job.best,
        "cache": job.cached,
        "metrics": {name: job.last[name] for name in SHOWN if name in job.last},
        "train_seconds": speed["seconds"],
        "speed": speed,
        **({"workers": busy} if (busy := job.team.busy()) else {}),
    }


def ask_for_rows(job: Job, why: str) -> GuardStop:
    """Leave what a round of fresh rollouts begins from: the actor, the held-out rows, which round it is.

    The state is saved, `last` written. What to raise: a plain stop where this very batch is of fresh rows,
    for fresher ones would not help.
    """
    now, cursor, number = job.round, job.cursor, job.round.number + 1
    begin = min(cursor.batch + (cursor.update > 0), job.batches - 1)
    if now.number and begin == now.begin:
        return GuardStop(f"train: {why}, and the rows were fresh; look at the rule that asks for others")
    if not (now.number or rounds.able(job.recipe)):
        return RefreshAsked(f"train: {why}: asks for fresh rollouts, and {NOT_ABLE} ({job.snapshots.folder})")
    held = rounds.held_out_file(job.recipe)
    if not now.number and job.rows.held_out:
        write_rows(held, [trajectory_row(row) for row in job.rows.held_out], TRAJECTORIES, job.rows.marks)
    _same(job.folder / "last", rounds.actor_folder(job.recipe, number))
    wanted = rounds.Round(
        number,
        begin=begin,
        asked=cursor.number,
        origin=now.origin or rounds.origin(job.recipe),
        mixes=now.mixes and all(row.behavior_log_probs is not None for row in job.train_rows),
        batches=job.batches,
        steps=job.steps,
        temperature=job.reins.soft.temperature,
        obeyed=now.obeyed or (job.audited and (job.audited.method, job.audited.settings)),
    )
    rounds.ask(job.recipe, wanted)
    return RefreshAsked(
        f"train: {why}: asks for fresh rollouts, which `rein run` makes and goes on with, or any command "
        f"with the actor {job.folder / 'last'} ({job.snapshots.folder})"
    )


def _same(last: Path, best: Path) -> None:
    try:
        twin_folder(last, best)
    except OSError as error:
        raise CheckpointError(
            f"{best}: cannot be saved ({error}); free space or choose another out="
        ) from error
