"""Weights & Biases. WANDB_MODE, WANDB_DIR, WANDB_ENTITY and the rest of its variables hold.

Online, a resumed run has the same id, and only the steps that the server lacks are sent. Offline (no account
is needed), one file holds the whole run: a resumed run writes it anew from metrics.jsonl under the same id,
and the earlier folder is renamed `replaced-...`, so that `wandb sync` sends each step once.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from rein.errors import ConfigError
from rein.tracking.run import KEY, Run, package, set_aside
from rein.types import Metrics

LOCAL = ("offline", "dryrun", "disabled")


def ready() -> None:
    """Raise ConfigError where wandb would ask for a key: a run is not held up by a prompt."""
    wandb = package("wandb", "wandb")
    if _is_local(wandb):
        return
    if not wandb.login(prompt=False):
        raise ConfigError(
            f"{KEY}: wandb is logged out; run `wandb login`, or set WANDB_MODE=offline (no account)"
        )


def _is_local(wandb: Any) -> bool:
    return wandb.setup().settings.mode in LOCAL


class Wandb:
    """Implements protocols.Tracker."""

    def __init__(self, run: Run) -> None:
        ready()
        wandb = package("wandb", "wandb")
        place = Path(os.environ.get("WANDB_DIR", run.folder))
        local, known_as = _is_local(wandb), run.id_of("wandb") or secrets.token_hex(4)
        if local:
            set_aside(place / "wandb", f"offline-run-*-{known_as}")
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=known_as,
            resume=None if local else "allow",
            dir=str(place),
            config=dict(run.settings),
            settings=wandb.Settings(console="off"),
        )
        run.keep_id("wandb", known_as)
        self._from = 0 if local else int(self._run.step)  # the server has the steps before
        for number, when, metrics in run.kept():
            self._send(metrics | {"_timestamp": when}, number)

    def log(self, metrics: Metrics, number: int) -> None:
        self._send(metrics, number)

    def _send(self, metrics: Metrics, number: int) -> None:
        if number >= self._from:
            self._run.log(metrics, step=number)

    def close(self) -> None:
        self._run.finish()
