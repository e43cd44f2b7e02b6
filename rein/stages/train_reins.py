"""The reins at work: what guards say is done here, and nowhere else. Part of stages/train.py.

Holds the guards, what remedies came to, the journal, and which snapshots a rollback may go to. A snapshot is
good once probes `confirm_steps` updates later found nothing; the newest good one is a rollback's target.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rein.errors import CheckpointError, GuardStop, OutOfMemory
from rein.guards.decide import decide
from rein.guards.presets import KL, acts, guards_of
from rein.journal import Journal
from rein.remedies import changed, in_words, relaxed, soften
from rein.snapshots import RunState
from rein.stages.train_end import ask_for_rows
from rein.stages.train_state import go_back
from rein.tracking.webhook import Webhook
from rein.types import Action, Experience, Metrics, Softening, Trajectory, Verdict

if TYPE_CHECKING:
    from rein.stages.train_job import Job

LEAVE = (Action.REFRESH, Action.PAUSE, Action.STOP)
JSON = dict[str, Any]


class Reins:
    """What the guards of a run have read and done."""

    def __init__(self, job: Job) -> None:
        self.job, self.settings = job, job.recipe.guards
        self.guards = guards_of(self.settings)
        self.acts = acts(self.guards)
        self.soft = Softening()
        self.journal = Journal(job.folder / "journal.jsonl")
        self.webhook = Webhook(self.settings.webhook) if self.settings.webhook else None
        self.good: int | None = None  # the snapshot that a rollback goes to
        self.pending: list[int] = []  # snapshots that no later probe has confirmed yet
        self.rollbacks = self.skipped = self.calm = 0
        self.excluded: set[str] = set()  # keys of rows that are left out
        self.anew = False  # the batch's experience is to be made again

    # what the loop asks

    def before(self, metrics: Metrics, rows: Sequence[Trajectory]) -> Verdict:
        """Of an update that is not applied yet: the gravest verdict, the remedies of all of them taken."""
        verdict = self._judge(decide(self.guards, metrics), metrics, rows, self.job.cursor.number + 1)
        if verdict.action is not Action.CONTINUE:
            self.skipped += 1
            metrics["guard/skipped"] = self.skipped
        return verdict

    def after(self, metrics: Metrics) -> Verdict:
        """Of a batch, a probe or a validation; a healthy probe confirms older snapshots.

        stop_epochs drops what is left of the batch's updates, of both roles.
        """
        softer = self.soft
        verdicts = [_too_late(verdict) for verdict in decide(self.guards, metrics)]
        verdict = self._judge(verdicts, metrics, (), self.job.cursor.number)
        if math.isfinite(metrics.get(KL, math.nan)) and verdict.action is Action.CONTINUE:
            self._healthy(softened=self.soft != softer)
        if verdict.action is Action.STOP_EPOCHS:
            self.job.dropped |= set(self.job.learner.roles)
            return Verdict()
        return verdict

    def _judge(
        self, verdicts: list[Verdict], metrics: Metrics, rows: Sequence[Trajectory], number: int
    ) -> Verdict:
        if verdicts and verdicts[0].action is Action.ROLLBACK:
            verdicts = verdicts[:1]  # what the others saw is undone with it: one cause softens once
        for verdict in verdicts:
            self._take(verdict, rows, number)
        metrics |= {f"guard/{verdict.rule}": verdict.value for verdict in verdicts}
        return verdicts[0] if verdicts else Verdict()

    def _healthy(self, *, softened: bool) -> None:
        old = self.job.cursor.number - self.settings.confirm_steps
        if not softened:
            confirmed = [number for number in self.pending if number <= old]
            self.good = max(confirmed, default=self.good)
            self.pending = [number for number in self.pending if number > old]
        self.calm = 0 if softened else self.calm + 1
        if self.settings.calm and self.calm >= self.settings.calm:
            self.calm = 0
            self._soften(relaxed(self.soft), "decay", reason=f"{self.settings.calm} healthy probes")

    def _take(self, verdict: Verdict, rows: Sequence[Trajectory], number: int) -> None:
        """Its remedies, and one line of what it said and what changed."""
        before, self.soft = self.soft, soften(self.soft, verdict.remedies)
        excluded = [row.key for row in rows] if ("exclude_rows", True) in verdict.remedies else []
        self.excluded |= set(excluded)
        self.anew |= self.soft.reward_clip != before.reward_clip
        self.calm = self.calm if self.soft == before else 0
        self._event(
            "verdict",
            number,
            rule=verdict.rule,
            metric=verdict.metric,
            value=verdict.value,
            limit=verdict.limit,
            action=_called(verdict),
            reason=verdict.reason,
            changed=changed(before, self.soft),
            **({"excluded": excluded} if excluded else {}),
        )
        self.apply()

    def _soften(self, soft: Softening, kind: str, **facts: Any) -> None:
        before, self.soft = self.soft, soft
        if moved := changed(before, soft):
            self._event(kind, self.job.cursor.number, changed=moved, **facts)
            self.apply()

    def apply(self) -> None:
        """Make learner and experience maker follow the remedies."""
        self.job.learner.soften(self.soft)
        self.job.maker.soften(self.soft)
        self.job.console.pin(f"softened: {softer}" if (softer := in_words(self.soft)) else "")

    def _event(self, kind: str, number: int, **facts: Any) -> None:
        job = self.job
        line = self.journal.append(kind, number=number, **facts)
        moved = "; ".join(
            f"{name} {_word(old)} -> {_word(new)}" for name, (old, new) in facts.get("changed", {}).items()
        )
        what = f"{facts['rule']}: {facts['action']}" if kind == "verdict" else kind
        job.console.say(f"guard: update {number}: {what}: {facts['reason']}{f' ({moved})' if moved else ''}")
        if self.webhook is not None and (trouble := self.webhook.post(line | {"out": job.recipe.out})):
            job.console.say(f"warning: {trouble}")

    # snapshots

    def start(self) -> None:
        """A rollback point that nothing goes behind: before the critic's fit, and before the actor moves."""
        if self.acts:
            self.good, self.pending, self.job.saved_at = self.job.cursor.number, [], None
            self.job.save(None)

    def keep(self, experience: Experience | None) -> None:
        """A rollback point where one is due."""
        every, newest = self.settings.snapshot_every, max([self.good or 0, *self.pending])
        if self.acts and every > 0 and self.job.cursor.number - newest >= every:
            self.job.save(experience)

    def saved(self, number: int) -> None:
        """A rollback point that is about to be written, unless it is good already, waits to be confirmed.

        They do not pile up: the one that waits longest stays, and the newest.
        """
        if self.acts and number != self.good and number not in self.pending:
            self.pending = [*self.pending[:1], number]

    @property
    def protected(self) -> set[int]:
        """Snapshots that rotation must leave."""
        best = self.job.best.get("snapshot")
        return {int(number) for number in (self.good, best, *self.pending) if number is not None}

    # leaving and going back

    def rollback(self, verdict: Verdict) -> None:
        """Restore the whole run state of the target; the journal, remedies and the update number stay.

        Raises GuardStop (the state is the target's, saved) when it is one rollback too many.
        """
        job, best = self.job, self.job.best.get("snapshot")
        left, (number, state) = job.cursor.number, self._target(verdict)
        go_back(job, state)
        if state.meta["reins"]["soft"]["reward_clip"] != dataclasses.asdict(self.soft)["reward_clip"]:
            job.kept_experience = None  # its advantages came from other rewards
        job.cursor.number = left + (best == left != number)  # the best's own snapshot is not written over
        self.good, self.pending = job.cursor.number, []
        self.rollbacks += 1
        job.log({"guard/rolled_back_to": number})  # what trackers were told since is undone
        self._event("rollback", left, reason=f"back to update {number}", **{"from": left, "to": number})
        self.apply()
        if best == number:
            job.best["snapshot"] = self.good
        job.save(job.kept_experience)
        if self.rollbacks > self.settings.max_rollbacks:
            most = f"rollback {self.rollbacks}, guards.max_rollbacks is {self.settings.max_rollbacks}"
            self.leave(Action.PAUSE, f"{verdict.reason}; {most}")

    def _target(self, verdict: Verdict) -> tuple[int, RunState]:
        """The snapshot to go back to; a broken one is passed over by name."""
        job, places = self.job, [self.good, self.job.best.get("snapshot")]
        for number in dict.fromkeys(places[::-1] if verdict.to_best else places):
            if number is not None:
                try:
                    return int(number), job.snapshots.load(int(number))
                except CheckpointError as error:
                    job.console.say(f"guard: {error} passed over")
        raise CheckpointError(
            f"{job.snapshots.folder}: {verdict.reason}, and no whole snapshot to go back to; start anew with "
            "resume=never"
        )

    def leave(self, action: Action, why: str) -> None:
        """End the run here, the state saved by the caller. Raises GuardStop."""
        job = self.job
        self._event("end", job.cursor.number, action=action.value, reason=why)
        if action is not Action.STOP:
            job.team.files.save("actor", job.folder / "last")
        if action is Action.REFRESH:
            raise ask_for_rows(job, why)
        words = {
            Action.PAUSE: "paused; read journal.jsonl, then go on with the same command",
            Action.STOP: "stopped; the state before is saved",
        }
        raise GuardStop(f"train: {why}: {words[action]} ({job.snapshots.folder})")

    def halve_budget(self, longest: int, error: BaseException) -> None:
        """After running out of memory. Raises OutOfMemory where the longest row alone is too much."""
        given = self.job.recipe.actor.token_budget
        if given * self.soft.token_budget <= longest:
            raise OutOfMemory(
                f"train: out of memory with {longest} tokens in a micro-batch, the longest row; shorten rows "
                "(data.max_response_length), use LoRA or gradient checkpointing"
            ) from error
        halved = dataclasses.replace(self.soft, token_budget=self.soft.token_budget / 2)
        self._soften(
            halved,
            "out_of_memory",
            reason=str(error).splitlines()[0][:200] if str(error) else "out of memory",
        )

    # run state

    def state(self) -> JSON:
        return {
            "guards": [guard.state() for guard in self.guards],
            "names": [guard.name for guard in self.guards],
            "soft": dataclasses.asdict(self.soft),
            "journal": self.journal.seq,
            "good": self.good,
            "pending": self.pending,
            "rollbacks": self.rollbacks,
            "skipped": self.skipped,
            "calm": self.calm,
            "excluded": sorted(self.excluded),
        }

    def restore_readings(self, state: JSON) -> None:
        """What guards had read: theirs alone is undone by a rollback. New ones have read nothing yet."""
        known = dict(zip(state["names"], state["guards"], strict=True))
        for guard in self.guards:
            if guard.name in known:
                guard.restore(known[guard.name])

    def resume(self, state: JSON, number: int) -> None:
        """Go on from a snapshot after the process ended."""
        self.restore_readings(state)
        clip = state["soft"]["reward_clip"]
        self.soft = Softening(**state["soft"] | {"reward_clip": None if clip is None else tuple(clip)})
        self.good, self.pending = state["good"], state["pending"]
        self.rollbacks, self.skipped, self.calm = state["rollbacks"], state["skipped"], state["calm"]
        if self.rollbacks > self.settings.max_rollbacks:  # a paused run that goes on has looked
            self.rollbacks = 0
        self.excluded = set(state["excluded"])
        self.journal.resumed(state["journal"], number)
        self.apply()

    def ground(self, *, anew: bool) -> None:
        """After a resume: where the good or the best snapshot is not in this folder, this one must do.

        `anew`: a round begins, and what is of other rows is nothing to go back to.
        """
        there = set() if anew else set(self.job.snapshots.numbers())
        self.pending = [number for number in self.pending if number in there]
        if self.job.best.get("snapshot") not in there:
            self.job.best.pop("snapshot", None)
        if self.acts and self.good not in there:
            self.good, self.pending, self.job.saved_at = self.job.cursor.number, [], None
            self.job.save(self.job.kept_experience)


def _too_late(verdict: Verdict) -> Verdict:
    """What is applied already cannot be skipped: that is said, and nothing else."""
    late = verdict.action is Action.SKIP
    return dataclasses.replace(verdict, action=Action.CONTINUE) if late else verdict


def _called(verdict: Verdict) -> str:
    if verdict.action is not Action.CONTINUE:
        return "rollback_to_best" if verdict.to_best else verdict.action.value
    return "soften" if verdict.remedies else "alert"


def _word(value: Any) -> str:
    return "recipe's" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
