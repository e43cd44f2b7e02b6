"""The jobs of crash.py and their processes: started, ended at a moment, started again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rein import cli

FIT, EPOCHS = 16, 2
TRAIN = f"""
    "score.reward={{name: format, options: {{pattern: '[0-4]{{2}}', match: search}}}}"
    data.train_batch_size=24 data.max_prompt_length=16 data.max_response_length=48 rollout.max_new_tokens=10
    actor.ppo_mini_batch_size=8 actor.ppo_epochs=2 actor.optim.lr=1e-3 actor.optim.lr_scheduler_type=cosine
    critic.optim.lr=1e-3 critic.fit_until=1.0 algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=100
    sft.share=0.1 trainer.critic_warmup={FIT} trainer.total_epochs={EPOCHS} trainer.save_freq=1
    trainer.test_freq=2 trainer.val_prompts=4 guards.snapshot_every=4 guards.confirm_steps=8
"""
ROLLBACK = """guards.preset=off guards.max_rollbacks=9
    "guards.rules=[{name: kl_high, metric: probe/kl_reference, above: 0.02, then: [rollback, {lr: 0.3}]}]"
"""
LORA = "model.lora_rank=4 model.lora_alpha=8"
JOBS = {  # name: the verb, its words
    "plain": ("train", TRAIN),
    "lora": ("train", f"{TRAIN} {LORA}"),
    "rollback": ("train", f"{TRAIN} actor.optim.lr=4e-3 {ROLLBACK}".replace("actor.optim.lr=1e-3", "")),
    "sft": ("sft", "sft.batch_size=8 sft.total_steps=60 sft.save_freq=2 sft.optim.lr=1e-3"),
    "reward": ("reward", "reward.batch_size=8 reward.epochs=4 reward.save_freq=2 reward.optim.lr=1e-3"),
}


@dataclass(frozen=True)
class Stop:
    """When a process is ended: past an update or some seconds, and then perhaps at the next save."""

    update: int | None = None
    seconds: float = 0.0
    in_save: bool = False
    gently: bool = False  # SIGTERM; with in_save, SIGKILL follows while it saves


@dataclass
class Process:
    """`rein` with these words, a fork or a new Python; what it says goes to a file."""

    words: Sequence[str]
    log: Path
    anew: bool = False
    pid: int = field(init=False)
    code: int | None = None

    def __post_init__(self) -> None:
        with self.log.open("ab") as file:
            if self.anew:
                command = [sys.executable, "-m", "rein", *self.words]
                self.pid = subprocess.Popen(command, stdout=file, stderr=file).pid
                return
            self.pid = os.fork()
            if not self.pid:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                code = 1
                try:
                    code = cli.main(self.words)
                    sys.stdout.flush()
                finally:
                    os._exit(code)

    def over(self, *, wait: bool = False) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def end(self, number: int) -> None:
        if not self.over():
            os.kill(self.pid, number)


class Job:
    """One job in one folder: started, ended, started again."""

    def __init__(self, name: str, base: Path, out: Path, anew: bool = False) -> None:
        self.verb, own = JOBS[name]
        self.out, self.stage, self.anew = out, out / self.verb, anew
        files = f"""
            out={out} cache={base}/cache threads=1 model.path={base}/prepared/sft/model
            data.train_files={base}/prepared/score/trajectories.parquet data.val_files={base}/data/dev.parquet
            sft.files={base}/data/demonstrations.parquet reward.files={base}/data/pairs.parquet
        """
        self.words = [self.verb, *files.split(), *shlex.split(own)]

    def start(self) -> Process:
        self.out.mkdir(parents=True, exist_ok=True)
        return Process(self.words, self.log, self.anew)

    def finish(self) -> float:
        """To the end; the seconds it took."""
        started = time.monotonic()
        process = self.start()
        process.over(wait=True)
        if process.code != 0:
            raise RuntimeError(f"{self.out}: exit code {process.code}:\n{self.log.read_text()[-2000:]}")
        return time.monotonic() - started

    @property
    def log(self) -> Path:
        return self.out.with_name(f"{self.out.name}.log")

    def metrics_file(self) -> int:
        """Which file the metrics are in: every start makes a new one."""
        try:
            return (self.stage / "metrics.jsonl").stat().st_ino
        except FileNotFoundError:
            return 0

    def reached(self) -> int:
        """The number of the last whole line of metrics."""
        try:
            text = (self.stage / "metrics.jsonl").read_bytes()
        except FileNotFoundError:
            return 0
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        return int(json.loads(lines[-1])["number"]) if lines else 0

    def _named(self, start: str) -> int:
        try:
            return sum(name.startswith(start) for name in os.listdir(self.stage / "snapshots"))
        except FileNotFoundError:
            return 0

    def saving(self) -> bool:
        return self._named(".draft-") > 0

    def half_saved(self) -> bool:
        """Whether a save was cut: its folder not yet renamed, or what it replaces not yet removed."""
        return self.saving() or self._named(".old-") > 0

    def ended(self, stop: Stop) -> dict[str, Any] | None:
        """Start it and end it there; where that was, None where it was over before."""
        former, begun = self.metrics_file(), time.monotonic()
        process = self.start()
        while stop.update is not None and not process.over():
            if self.metrics_file() != former and self.reached() >= stop.update:
                break
            time.sleep(0.001)
        if stop.gently:
            process.end(signal.SIGTERM)
        while stop.in_save and not self.saving() and not process.over():
            pass
        until = time.monotonic() + stop.seconds
        while time.monotonic() < until and not process.over():
            pass
        if stop.in_save or not stop.gently:
            process.end(signal.SIGKILL)
        process.over(wait=True)
        if process.code not in (-signal.SIGKILL, 128 + signal.SIGTERM):
            return None
        killed = process.code == -signal.SIGKILL
        return {
            "signal": "SIGKILL" if killed else "SIGTERM",
            "update": self.reached(),
            "seconds": round(time.monotonic() - begun, 3),
            "in_save": killed and self.half_saved(),
        }
