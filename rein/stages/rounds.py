"""Rounds of fresh rollouts: the actor answers prompts, a reward scores them, training goes on. Not a verb.

Round 0 trains on the recipe's own rows. Training that asks for a refresh leaves `train/round.json`, which
says what comes next, and in `<out>/round-N` the actor that is to answer; there the rows of round N are made.
pipeline.py loops; what opens training reads which round it is. Knows no model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rein import manifest
from rein.config import paths
from rein.config.load import write_json
from rein.config.recipe import Recipe
from rein.errors import CheckpointError, RefreshAsked
from rein.rewards import uses_model

NAME = "round.json"
MAKING = ("rollout", "score")  # the stages of a round before it trains, in order
ROWS = "trajectories.parquet"


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One round of a run, by what came before it.

    Round(2, begin=8, batches=12, steps={"actor": 48, "critic": 48})
    """

    number: int = 0
    begin: int = 0  # batches done when it begins
    asked: int = 0  # updates ever made by then: the number of the snapshot that it goes on from
    batches: int | None = None  # of the whole run; None: as the rows give it
    steps: Mapping[str, int] | None = None  # of each role's optimizer over the whole run
    temperature: float | None = None  # of its rollouts, where a remedy set one
    origin: str = ""  # a hash of what the run's rows come from
    mixes: bool = True  # whether the recipe's own rows have the log-probs that fresh ones have
    obeyed: tuple[str, Mapping[str, Any]] | None = None  # method and settings that `auto` came to at first


def current(recipe: Recipe) -> Round:
    """The round that training is in, or that it has asked for. Raises CheckpointError for a broken file."""
    file = _file(recipe)
    if not file.exists():
        return Round()
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        return Round(**body | {"obeyed": tuple(body["obeyed"]) if body["obeyed"] else None})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); begin anew with resume=never") from error


def ask(recipe: Recipe, wanted: Round) -> None:
    """From now on the run is in this round, whose rows are still to be made."""
    write_json(_file(recipe), dataclasses.asdict(wanted))
    shutil.rmtree(actor_folder(recipe, wanted.number - 1), ignore_errors=True)  # its answers are kept


def clear(recipe: Recipe) -> None:
    """The run begins anew, with round 0."""
    for file in (_file(recipe), held_out_file(recipe)):
        file.unlink(missing_ok=True)
    for folder in Path(recipe.out).glob("round-*"):
        shutil.rmtree(folder, ignore_errors=True)


def actor_folder(recipe: Recipe, number: int) -> Path:
    """The actor that answers the prompts of a round."""
    return _folder(recipe, number) / "actor"


def held_out_file(recipe: Recipe) -> Path:
    """Rows that round 0 held out: later rounds are probed on the same, and answer none of their prompts."""
    return paths.stage_dir(recipe, "train") / "held_out.parquet"


def able(recipe: Recipe) -> bool:
    """Whether `rein run` may make fresh rows of this recipe.

    A server keeps its weights; where no stage scores, stored scores may be of what is no reward here.
    """
    scores = recipe.trainer.refresh_every > 0 or "score" in recipe.stages
    return scores and recipe.rollout.engine != "server"


def origin(recipe: Recipe) -> str:
    """A hash of what rounds come from: the recipe's own rows, the prompts, how they are answered."""
    files = [*paths.train_files(recipe), *paths.rollout_files(recipe)]
    settings = manifest.settings_read(recipe, "rollout")
    del settings["data"]  # `auto` settles some of it
    facts = [[manifest.hash_input(file) for file in files], settings]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def refuse_others(recipe: Recipe) -> None:
    """Raise CheckpointError where rounds have begun with other rows or other ways to make them."""
    now = current(recipe)
    if now.number and now.origin != origin(recipe):
        raise CheckpointError(
            f"{_file(recipe)}: a run with other rows, prompts or settings of rollout is in round "
            f"{now.number}; use the same, another out=, or begin anew with resume=never"
        )


def refuse_unmade(recipe: Recipe) -> None:
    """Raise RefreshAsked where the rows of the round are still to be made."""
    now = current(recipe)
    if now.number and not all(Path(file).exists() for file in _rows(recipe, now.number)):
        raise RefreshAsked(
            f"train: round {now.number} waits for fresh rollouts of {actor_folder(recipe, now.number)}, "
            "which `rein run` makes and goes on with"
        )


def making(recipe: Recipe, now: Round, stage: str) -> Recipe:
    """The recipe by which a stage of MAKING makes the rows of a round; each prompt is answered once."""
    rollout, held = recipe.rollout, held_out_file(recipe)
    left_out = [*recipe.data.leave_out, *([str(held)] if held.exists() else [])]
    data: dict[str, Any] = {"leave_out": left_out, "behavior": None, "behavior_model": None}
    if stage == "rollout":
        data |= {"drop_duplicates": True, "max_copies": None}
    return recipe.model_copy(
        update={
            "out": str(_folder(recipe, now.number)),
            "stages": list(MAKING),
            "model": recipe.model.model_copy(update={"path": paths.start_policy(recipe, "train")}),
            "data": recipe.data.model_copy(update=data),
            "rollout": rollout.model_copy(
                update={
                    "files": paths.rollout_files(recipe),
                    "path": str(actor_folder(recipe, now.number)),
                    "policy_version": rollout.policy_version + now.number,
                    "skip_prompts": rollout.skip_prompts + now.number * (rollout.max_prompts or 0),
                    "temperature": rollout.temperature if now.temperature is None else now.temperature,
                }
            ),
            "score": recipe.score.model_copy(
                update={
                    "files": [],
                    "path": paths.reward_model(recipe) if uses_model(recipe.score.reward) else None,
                }
            ),
        }
    )


def training(recipe: Recipe) -> Recipe:
    """The recipe by which `train` trains on the newest `trainer.keep_versions` versions of the rows."""
    now = current(recipe)
    if not now.number:
        return recipe
    oldest = max(now.number - recipe.trainer.keep_versions + 1, 0)
    known = recipe.data.behavior in (None, "stored")
    if not (known and now.mixes):  # only who wrote the fresh ones is
        oldest = max(oldest, 1)
    files = [file for number in range(now.number, oldest - 1, -1) for file in _rows(recipe, number)]
    data = {"train_files": files} | ({} if known else {"behavior": "stored", "behavior_model": None})
    return recipe.model_copy(
        update={
            "stages": [stage for stage in recipe.stages if stage not in MAKING],
            "resume": "auto" if recipe.resume == "never" else recipe.resume,
            "data": recipe.data.model_copy(update=data),
        }
    )


def _rows(recipe: Recipe, number: int) -> list[str]:
    if not number:
        return paths.train_files(recipe)
    return [str(_folder(recipe, number) / "score" / ROWS)]


def _folder(recipe: Recipe, number: int) -> Path:
    return Path(recipe.out) / f"round-{number}"


def _file(recipe: Recipe) -> Path:
    return paths.stage_dir(recipe, "train") / NAME
