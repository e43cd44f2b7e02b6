"""SwanLab. SWANLAB_MODE, SWANLAB_LOG_DIR, SWANLAB_API_KEY and the rest of its variables hold.

Online, a resumed run has the same id. Offline and local (no account is needed) a run is a folder: a resumed
run writes it anew from metrics.jsonl under the same id, and the earlier folder is renamed `replaced-...`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from rein.errors import ConfigError
from rein.tracking.run import KEY, Run, package, set_aside
from rein.types import Metrics


def ready() -> None:
    """Raise ConfigError where swanlab would ask for a key, or would go on without its page in silence."""
    swanlab = package("swanlab", "swanlab")
    settings = swanlab.Settings()
    if settings.mode == "online" and not settings.api_key:
        raise ConfigError(
            f"{KEY}: swanlab is logged out; run `swanlab login`, or set SWANLAB_MODE=offline (no account)"
        )
    if settings.mode == "local":
        package("swanboard", "swanlab")


class SwanLab:
    """Implements protocols.Tracker."""

    def __init__(self, run: Run) -> None:
        ready()
        swanlab = package("swanlab", "swanlab")
        mode, known_as = swanlab.Settings().mode, run.id_of("swanlab") or secrets.token_hex(4)
        place = Path(os.environ.get("SWANLAB_LOG_DIR", run.folder / "swanlog"))
        if mode != "online":
            set_aside(place, f"run-*-{known_as}")
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.name,
            id=known_as,
            resume="allow",
            log_dir=str(place),
            config=dict(run.settings),
            settings=swanlab.Settings(interactive=False),
        )
        run.keep_id("swanlab", known_as)
        if mode != "online":
            for number, _, metrics in run.kept():
                self.log(metrics, number)

    def log(self, metrics: Metrics, number: int) -> None:
        self._run.log(dict(metrics), step=number)

    def close(self) -> None:
        self._run.finish()
