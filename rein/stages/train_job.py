"""What the training loop stands on: models, rows, tracker, snapshots, cursor. Part of stages/train.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rein.config import paths
from rein.config.load import kl_coefs
from rein.config.methods import needs
from rein.config.recipe import Recipe
from rein.data.audit.verdict import Verdict as AuditVerdict
from rein.data.batches import epoch_batches, epoch_order
from rein.data.groups import by_prompt, longest_group, units
from rein.experience import ExperienceMaker, value_metrics
from rein.guards.presets import KL
from rein.learner import mini_batch_size, optimizer_steps
from rein.probe import Probe
from rein.runtime.clock import Clock
from rein.runtime.memory import give_back_now
from rein.runtime.profiler import Profiler
from rein.runtime.seeding import derive
from rein.snapshots import Snapshots
from rein.stages.off_policy_evaluation import metrics_of as off_policy_metrics
from rein.stages.rounds import Round
from rein.stages.team import Team, make_learner
from rein.stages.train_end import end
from rein.stages.train_pace import Pace
from rein.stages.train_reins import Reins
from rein.stages.train_rows import Rows, without
from rein.stages.train_state import Cursor, run_state, settings
from rein.tracking.console import Console
from rein.tracking.fanout import Fanout
from rein.types import Action, Experience, Metrics, Trajectory, Update, Verdict
from rein.validator import Validator

HELD_OUT_VALUE_ROWS = 256


class Job:
    """Everything the loop touches. Built by train_open.py, which restores the newest snapshot."""

    def __init__(
        self,
        recipe: Recipe,
        console: Console,
        rows: Rows,
        start: str,  # content hashes of what actor and critic start from
        team: Team,
        maker: ExperienceMaker,
        probe: Probe,
        validator: Validator | None,
        clock: Clock,
        now: Round,
    ) -> None:
        self.recipe, self.console, self.round = recipe, console, now
        self.rows, self.train_rows, self.start = rows, rows.train, start
        self.team = team
        self.actor, self.critic = actor, critic = team.actor, team.critic
        self.maker, self.probe, self.validator = maker, probe, validator
        self.clock, self.pace = clock, Pace(clock, actor, critic, alone=team.alone)
        self.folder = paths.stage_dir(recipe, "train")
        self.profiler = Profiler(recipe.trainer.profile, self.folder / "profile")
        clock.marks = self.profiler.phase
        self._planned: tuple[int, list[list[int]]] | None = None
        wanted = needs(recipe)
        keep, longest = recipe.data.keep_groups, longest_group(recipe, rows.train)
        paired, grouped = "pairs" in wanted and not keep, "groups" in wanted or keep
        self.longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows.train)
        self.units = units(rows.train, paired=paired, grouped=grouped)
        self.per_epoch = len(self._plan(0))
        trainer = recipe.trainer
        self.batches = now.batches or trainer.total_training_steps or trainer.total_epochs * self.per_epoch
        every = trainer.refresh_every
        self.until = min(now.begin + every, self.batches) if every > 0 else self.batches  # of this round
        self.fit_steps = recipe.trainer.critic_warmup if critic is not None else 0
        self.steps = now.steps or self._steps(longest)
        self.total_updates = self.fit_steps + sum(self.steps.values())
        in_reward, in_loss, _ = kl_coefs(recipe)
        options = {
            "kl_coef_in_loss": in_loss,
            "kl_coef_in_reward": in_reward,
            "actor_steps": self.steps["actor"],
            "critic_steps": self.steps.get("critic", 0) + self.fit_steps,
            "demonstrations": rows.demonstrations,
            "longest_group": longest,
        }
        self.learner = team.made("learner", make_learner, recipe, **options)
        self.snapshots = Snapshots(self.folder / "snapshots", write=team.write)
        self.reins = Reins(self)
        self.dropped: set[str] = set()  # roles whose updates of this batch are over (stop_epochs)
        self.cursor = Cursor()
        self.kept_experience: Experience | None = None
        self.best: dict[str, float] = {}
        self.last: Metrics = {}
        self.validated = False
        self.applied: dict[str, int] = {}  # updates by role
        self.saved_at: Cursor | None = None
        self.cached: dict[str, dict[str, int]] = {}  # rows that the cache knew, by kind of numbers
        self.tracker: Fanout | None = None
        self.audited: AuditVerdict | None = None  # what algorithm.method auto obeyed

    # rows of a step

    def _sizes(self) -> Counter[int]:
        """How many batches of each size there are; one epoch tells where all are cut alike."""
        epochs, rest = divmod(self.batches, self.per_epoch)
        alike = not self.recipe.data.shuffle or len({len(unit) for unit in self.units}) == 1
        first = [len(batch) for batch in self._plan(0)]
        if alike:
            return Counter({size: n * epochs for size, n in Counter(first).items()}) + Counter(first[:rest])
        return Counter(len(self._rows_of(self.round.begin + batch)) for batch in range(self.batches))

    def _steps(self, longest: int) -> dict[str, int]:
        """Optimizer steps of each role, critic fit apart."""
        roles = ["actor"] if self.critic is None else ["actor", "critic"]
        return {role: optimizer_steps(self.recipe, role, self._sizes(), longest) for role in roles}

    def _plan(self, epoch: int) -> list[list[int]]:
        data, seed = self.recipe.data, self.recipe.data_seed
        if self._planned is None or self._planned[0] != epoch:
            found = epoch_batches(self.units, data.train_batch_size, seed, epoch, data.shuffle)
            self._planned = epoch, found
        return self._planned[1]

    def _rows_of(self, batch: int) -> list[int]:
        batch -= self.round.begin
        return self._plan(batch // self.per_epoch)[batch % self.per_epoch]

    def rows_of(self, batch: int) -> list[Trajectory]:
        """The rows of a batch: a function of the data seed and the batch's number in its round alone."""
        return without([self.train_rows[i] for i in self._rows_of(batch)], self.reins.excluded)

    def updates_of(self, rows: list[Trajectory], batch: int) -> list[Update]:
        """The plan of a batch's updates; data.keep_groups keeps a prompt's rows in one of them."""
        together = by_prompt(rows) if self.recipe.data.keep_groups else None
        return self.learner.updates(len(rows), batch, together)

    def fit_batch(self, step: int) -> Experience:
        """The mini-batch of critic-fit update `step`, with the stored returns as targets."""
        size = min(mini_batch_size(self.recipe, "critic"), len(self.train_rows))
        per_epoch = -(-len(self.train_rows) // size)
        seed = derive(self.recipe.data_seed, "fit")
        order = epoch_order(len(self.train_rows), seed, step // per_epoch, True)
        begin = (step % per_epoch) * size
        rows = without([self.train_rows[i] for i in order[begin : begin + size]], self.reins.excluded)
        returns, mask = self.maker.stored_returns(rows)
        zeros = torch.zeros_like(returns)
        return Experience(rows, mask, torch.ones(len(rows)), zeros, zeros, returns=returns)

    def fit_update(self, experience: Experience) -> Update:
        return Update("critic", tuple(range(len(experience.rows))), 0)

    def end_fit(self) -> None:
        """The critic explains enough: what is left of the fit is taken out of every count."""
        self.shorten_fit(self.cursor.fitted)

    def shorten_fit(self, steps: int) -> None:
        left = self.fit_steps - steps
        if left:
            self.fit_steps -= left
            self.total_updates -= left
            self.learner.shorten("critic", left)

    def held_out_explained_variance(self) -> float:
        """Explained variance of the stored returns on held-out rows; NaN where there are none."""
        rows = self.rows.held_out[:HELD_OUT_VALUE_ROWS]
        if self.critic is None or not rows:
            return math.nan
        returns, mask = self.maker.stored_returns(rows)
        with self.clock("values"):
            values = self.maker.passes.values(rows, self.maker.token_budget)
        return value_metrics(values, returns, mask)["critic/vf_explained_var"]

    # what is said and kept

    def log(self, metrics: Metrics) -> None:
        self.last |= metrics
        if metrics and self.tracker is not None:
            self.tracker.log(metrics, self.cursor.number)

    def log_times(self, rows: Sequence[Trajectory] = ()) -> None:
        """Times since the last call, to trackers alone: no guard reads them, no snapshot keeps them."""
        metrics = self.pace.metrics(rows)
        if self.tracker is not None:
            self.tracker.log(metrics, self.cursor.number)

    def probed(self) -> Metrics:
        with self.clock("probe"):
            give_back_now()
            metrics = self.probe.measure()
            give_back_now()
            return metrics

    def note(self, metrics: Metrics) -> str:
        """The few numbers beside the progress bar."""
        shown = {
            "kl": "probe/kl_reference",
            "val": "val/score",
            "ope": "ope/score",
            "vf": "critic/vf_loss",
            "clip": "actor/pg_clipfrac",
        }
        known = self.last | metrics
        return " ".join(f"{short} {known[name]:.4g}" for short, name in shown.items() if name in known)

    def validate_start(self, between: Callable[[], None]) -> Verdict:
        """Probe and held-out score of the start policy: what later ones are held against."""
        metrics = self.probed()
        if self.recipe.trainer.val_before_train:
            metrics |= self._validate(between)
        verdict = self.reins.after(metrics)
        self._take_best(metrics)
        self.validated, self.dropped = True, set()
        self.log(metrics)
        return verdict

    def _validate(self, between: Callable[[], None]) -> Metrics:
        found = {} if self.validator is None else self.validator.measure(lambda _: between())
        if "val/score" not in found:
            with self.clock("testing"):
                found |= off_policy_metrics(self.rows.held_out, self.maker.passes, self.maker.token_budget)
        return found

    def _take_best(self, metrics: Metrics) -> bool:
        """Keep the actor as the best where its held-out score is no lower than any before; where the first
        best had none, what it would surely score by the stored rows, if those can be trusted.
        """
        name = "val/score" if "val/score" in metrics else "ope/low"
        score, trusted = metrics.get(name), name == "val/score" or bool(metrics.get("ope/trust"))
        other = bool(self.best) and name not in self.best  # of the two kinds, which cannot be compared
        if score is None or not trusted or other or score < self.best.get(name, -math.inf):
            return False
        kept = {key: metrics[key] for key in (name, KL) if key in metrics}
        self.best = kept | {"number": self.cursor.number}
        if self.reins.acts:
            self.best["snapshot"] = self.cursor.number
        with self.clock("save_checkpoint"):
            self.team.files.save("actor", self.folder / "best")
        return True

    def after_batch(self, rows: int, between: Callable[[], None]) -> Verdict:
        """The updates of a batch are done: probe, validate where due, then move on, save where due.

        The verdict of the guards; where they ask for more than an alert, nothing else is done.
        """
        trainer, step = self.recipe.trainer, self.cursor.batch + 1
        last = step == self.batches
        metrics = self.probed()
        kl = metrics.get(KL, math.nan)
        if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
            metrics |= self._validate(between)
        verdict = self.reins.after(metrics)
        self.log(metrics)
        if "val/score" in metrics or "ope/score" in metrics:
            self.console.say(f"step {step}/{self.batches}: {self.note(metrics)}")
        if verdict.action is not Action.CONTINUE:
            return verdict
        self.cursor.batch, self.cursor.update, self.dropped = step, 0, set()
        self.learner.control_kl(kl, rows, step / self.batches)
        better = self._take_best(metrics)
        due = trainer.save_freq > 0 and step % trainer.save_freq == 0
        if last or due or (better and self.reins.acts):
            self.save(None)
        else:
            self.reins.keep(None)
        self.log_times(self.rows_of(step - 1))
        return verdict

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """What a resumed run must share with the one that was saved: made once, for it reads every row."""
        return settings(self)

    def save(self, experience: Experience | None, *, point: bool = True) -> None:
        """Snapshot the whole run state, unless this very state is saved already; `point`: to go back to."""
        if self.saved_at != self.cursor:
            number = self.cursor.number
            if point:
                self.reins.saved(number)
            with self.clock("save_checkpoint"):
                self.snapshots.save(number, run_state(self, experience), protect=self.reins.protected)
            self.saved_at = dataclasses.replace(self.cursor)

    def finish(self) -> dict[str, Any]:
        """What is left when all updates are done; the facts for the manifest."""
        return end(self)

    def close(self) -> None:
        try:
            self.profiler.close()
        finally:
            if self.tracker is not None:
                self.tracker.close()
