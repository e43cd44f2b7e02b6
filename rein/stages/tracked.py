"""A stage's trackers, as its recipe names them."""

from __future__ import annotations

from pathlib import Path

from rein.config.load import resolved
from rein.config.recipe import Recipe
from rein.tracking.console import Console
from rein.tracking.fanout import Fanout, open_trackers
from rein.tracking.run import Run


def trackers_of(recipe: Recipe, console: Console, folder: Path, from_number: int) -> Fanout:
    """Open them on the stage's folder; a stage beside train is a run of its own, NAME-STAGE."""
    trainer = recipe.trainer
    name = trainer.experiment_name or Path(recipe.out).resolve().name
    if folder.name != "train":
        name = f"{name}-{folder.name}"
    run = Run(folder, from_number, trainer.project_name, name, resolved(recipe))
    return open_trackers(trainer.logger, run, console=console.watch)
