"""A recipe's stages in order: each is run, or skipped where its manifest shows the same work done.

Every stage goes through `run_stage`, by itself or in a pipeline: it times the stage and writes its manifest.
`run` also writes recipe.json, summary.json and a manifest of the whole. The only place that lists the stages;
knows nothing of what they do.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rein import manifest
from rein.config import paths
from rein.config.load import dump, write_json
from rein.config.methods import AUTO
from rein.config.recipe import Recipe, RewardSpec
from rein.data.files import sources
from rein.errors import CheckpointError, ConfigError, GateFailed, RefreshAsked
from rein.guards.presets import guards_of
from rein.remedies import soften
from rein.rewards import build, uses_model
from rein.runtime.lock import held
from rein.runtime.memory import free_models
from rein.stages import gate_facts, judges, rounds
from rein.stages.process import Stage, clustered, on_ranks, prepare_process
from rein.tracking.console import Console
from rein.tracking.fanout import check_trackers
from rein.types import Softening

MODULES = {
    "sft": "rein.stages.sft",
    "reward": "rein.stages.reward_model",
    "rollout": "rein.stages.rollout",
    "score": "rein.stages.score",
    "train": "rein.stages.train",
    "evaluate": "rein.stages.evaluate",
    "export": "rein.stages.export",
    "report": "rein.stages.report",
}
ON_RANKS = ("sft", "reward", "train")  # what runtime: fsdp spreads over processes
BESIDE = ("report",)  # may look at a folder while a run is at work in it
COMPARED = ("before", "after", "lift", "lift_ci95")


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """The recipe's stages, then summary.json; returns the summary."""
    preflight(recipe, recipe.stages)
    with held(Path(recipe.out)), clustered(recipe, [stage for stage in recipe.stages if stage in ON_RANKS]):
        return _run(recipe, console)


def _run(recipe: Recipe, console: Console) -> dict[str, Any]:
    out = Path(recipe.out)
    dump(recipe, out / "recipe.json")
    started, skipped, refused = time.monotonic(), 0.0, None
    for stage in recipe.stages:
        try:
            skipped += (_train if stage == "train" else _unless_done)(stage, recipe, console)
        except GateFailed as error:  # the report is read all the same
            refused = error
        if stage == "evaluate" or stage == recipe.stages[-1]:  # the report shows the summary
            _summarize(recipe, time.monotonic() - started + skipped)
    summary = _summarize(recipe, time.monotonic() - started + skipped)
    if "evaluate" in recipe.stages and "export" not in recipe.stages:
        refused = gate_facts.refuse_run(recipe, console)
    if refused is not None:
        raise refused
    inputs = [str(paths.stage_dir(recipe, stage) / manifest.NAME) for stage in recipe.stages]
    manifest.write(
        out, stage="run", recipe=recipe, inputs=inputs, rows={}, facts=summary, seconds=summary["seconds"]
    )
    if "lift" in summary:
        before, after, (low, high) = summary["before"], summary["after"], summary["lift_ci95"]
        console.say(
            f"result: {before['score']:.3f} before, {after['score']:.3f} after, "
            f"lift {summary['lift']:+.3f} (95 % [{low:+.3f}, {high:+.3f}]), "
            f"{summary['seconds']:.0f} s; {out / 'summary.json'}"
        )
    return summary


def _unless_done(stage: str, recipe: Recipe, console: Console) -> float:
    """Run the stage; the seconds that it took before, where the same work was done."""
    if (done := _done_before(recipe, stage)) is not None:
        console.say(f"{stage}: done before ({done:.0f} s), skipped")
        return done
    (Path(recipe.out) / "summary.json").unlink(missing_ok=True)  # it would tell of another run
    console.say(f"{stage}: {paths.stage_dir(recipe, stage)}")
    _run_stage(stage, recipe, console)
    return 0.0


def _train(stage: str, recipe: Recipe, console: Console) -> float:
    """Train; where it asks for fresh rollouts make them, score them and go on, as often as it asks."""
    if recipe.resume == "never" and not _stands(recipe):
        rounds.clear(recipe)
    while True:
        rounds.refuse_others(recipe)
        if (now := rounds.current(recipe)).number and _done_before(rounds.training(recipe), stage) is None:
            for earlier in rounds.MAKING:
                making = rounds.making(recipe, now, earlier)
                preflight(making, [earlier])
                _unless_done(earlier, making, console)
        try:
            return _unless_done(stage, rounds.training(recipe), console)
        except RefreshAsked as asked:
            if not rounds.able(recipe):
                raise
            console.say(f"round {rounds.current(recipe).number}: {asked}")
        recipe = recipe.model_copy(update={"resume": "auto"})
        free_models()  # what training held goes with the error, before others are opened


def _stands(recipe: Recipe) -> bool:
    """Whether the training that is here is the recipe's, and done."""
    try:
        rounds.refuse_others(recipe)
        return _done_before(rounds.training(recipe), "train") is not None
    except CheckpointError:
        return False


def run_stage(stage: str, recipe: Recipe, console: Console) -> dict[str, Any]:
    """One stage, timed, with its manifest; returns its facts."""
    preflight(recipe, [stage])
    with nullcontext() if stage in BESIDE else held(Path(recipe.out)):
        if stage == "train":
            if recipe.resume == "never":
                rounds.clear(recipe)
            rounds.refuse_others(recipe)
            rounds.refuse_unmade(recipe)
            recipe = rounds.training(recipe)
        return _run_stage(stage, recipe, console)


def _run_stage(stage: str, recipe: Recipe, console: Console) -> dict[str, Any]:
    folder, inputs = paths.stage_dir(recipe, stage), stage_inputs(recipe, stage)
    (folder / manifest.NAME).unlink(missing_ok=True)
    prepare_process(recipe)
    entry: Stage = importlib.import_module(MODULES[stage]).run
    started = time.monotonic()
    facts = on_ranks(stage, entry, recipe, console) if stage in ON_RANKS else dict(entry(recipe, console))
    seconds = time.monotonic() - started
    free_models()
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(
        folder,
        stage=stage,
        recipe=recipe,
        inputs=inputs,
        rows=facts.pop("rows", {}),
        facts=facts,
        seconds=seconds,
    )
    return facts


def stage_inputs(recipe: Recipe, stage: str) -> list[str]:
    """The files and folders that a stage reads. Raises ConfigError when the recipe does not name one."""
    specs = _rewards(recipe, stage)
    reward_model = [paths.reward_model(recipe)] if uses_model(specs) else []
    functions = [source for spec in specs if (source := manifest.function_file(spec.name))]
    match stage:
        case "sft":
            return [paths.base_model(recipe), *paths.sft_files(recipe)]
        case "reward":
            return [paths.reward_trunk(recipe), *paths.reward_files(recipe)]
        case "rollout":
            engine = [file] if (file := manifest.function_file(recipe.rollout.engine)) else []
            return [
                paths.rollout_policy(recipe),
                *paths.rollout_files(recipe),
                *recipe.data.leave_out,
                *engine,
            ]
        case "score":
            return [*paths.score_files(recipe), *reward_model, *functions]
        case "train":
            models = [paths.start_policy(recipe, "train"), paths.critic_start(recipe)]
            models += paths.behavior_model(recipe)
            files = [*paths.train_files(recipe), *recipe.data.val_files, *paths.mixed_files(recipe)]
            asked = recipe.evaluate.files if recipe.algorithm.method == AUTO else []
            return [*models, *files, *recipe.data.leave_out, *asked, *reward_model, *functions]
        case "evaluate":
            before = recipe.evaluate.before or paths.start_policy(recipe, "train")
            after = recipe.evaluate.after or paths.trained_actor(recipe)
            return [before, after, *paths.evaluate_files(recipe), *reward_model, *functions]
        case "export":
            judged = paths.stage_dir(recipe, "evaluate") / "evaluation.json"  # the gate and the card read it
            return [paths.export_source(recipe), *([str(judged)] if judged.exists() else [])]
        case "report":
            train, evaluate = paths.stage_dir(recipe, "train"), paths.stage_dir(recipe, "evaluate")
            return [str(train / "metrics.jsonl"), str(evaluate)]
    raise ConfigError(f"stages: {stage} is unknown; write some of {', '.join(MODULES)}")


def preflight(recipe: Recipe, stages: Sequence[str]) -> None:
    """Raise before any work when a reward or guard is unknown, a tracker lacks what it stands on, an input is
    missing that no earlier stage will make, or `out` cannot be written.

    DataError for data files, CheckpointError for `out`, ConfigError for the rest. Names that may be a hub's
    pass.
    """
    _refuse_unwritable(Path(recipe.out))
    if set(stages) & set(ON_RANKS):
        check_trackers(recipe.trainer.logger)
    if "train" in stages:
        for guard in guards_of(recipe.guards):
            soften(Softening(), getattr(guard, "remedies", ()))
    data_files = {*recipe.data.train_files, *recipe.data.val_files}
    for section in (recipe.sft, recipe.reward, recipe.rollout, recipe.score, recipe.evaluate):
        data_files |= set(section.files)
    for index, stage in enumerate(stages):
        build([spec for spec in _rewards(recipe, stage) if not uses_model([spec])], scorer=None)
        for name in stage_inputs(recipe, stage):
            if stage == "report":
                continue
            if Path(name).expanduser().exists():
                _refuse_unfinished(recipe, stage, name, stages[:index])
                continue
            maker = made_by(recipe, name)
            if maker is None and name in data_files:
                sources([name])
            elif maker is None and (name.startswith((".", "/", "~")) or name.count("/") != 1):
                raise ConfigError(f"{stage}: path {name} does not exist; correct the path")
            elif maker is not None and maker not in stages[:index]:
                raise ConfigError(f"{stage}: {name} is not there; run `rein {maker}` with this recipe first")


def _refuse_unfinished(recipe: Recipe, stage: str, name: str, earlier: Sequence[str]) -> None:
    """A killed train leaves a `best` that nothing stands behind: it is no result unless it is asked for."""
    asked = {"evaluate": recipe.evaluate.after, "export": recipe.export.path}.get(stage)
    own = asked is None and name == paths.trained_actor(recipe) and "train" not in earlier
    if own and manifest.read(paths.stage_dir(recipe, "train")) is None:
        key = {"evaluate": "evaluate.after", "export": "export.path"}[stage]
        raise ConfigError(
            f"{stage}: train has not finished in {recipe.out}; run `rein train` again, or say {key}={name}"
        )


def _refuse_unwritable(out: Path) -> None:
    beside = out.absolute()
    while not beside.exists():
        beside = beside.parent
    if not beside.is_dir():
        raise CheckpointError(f"out: {out} cannot be made, {beside} is a file; choose another out=")
    if not os.access(beside, os.W_OK):
        raise CheckpointError(
            f"out: {beside} cannot be written to; change its permissions or choose another out="
        )


def made_by(recipe: Recipe, name: str) -> str | None:
    """The stage whose folder holds this input; None for what the user brings."""
    path, out = Path(name), Path(recipe.out)
    stage = path.relative_to(out).parts[0] if path.is_relative_to(out) and path != out else ""
    return stage if stage in MODULES else None


def _done_before(recipe: Recipe, stage: str) -> float | None:
    """The seconds that the stage took when the same work was done; None where it must be run."""
    folder = paths.stage_dir(recipe, stage)
    if not manifest.is_done(folder, manifest.fingerprint(recipe, stage, stage_inputs(recipe, stage))):
        return None
    return float((manifest.read(folder) or {})["seconds"])


def _summarize(recipe: Recipe, seconds: float) -> dict[str, Any]:
    """Write summary.json: before and after where evaluated, and what the stages took."""
    summary: dict[str, Any] = {}
    evaluation = paths.stage_dir(recipe, "evaluate") / "evaluation.json"
    if "evaluate" in recipe.stages and evaluation.exists():
        found = json.loads(evaluation.read_text(encoding="utf-8"))
        summary = {key: found[key] for key in COMPARED if key in found}
        quiet, after = Console(quiet=True), recipe.evaluate.after or paths.trained_actor(recipe)
        gate = gate_facts.pass_gate(recipe, after, quiet)
        summary["gate"] = gate.as_json(forced=recipe.export.force)
    done = {stage: manifest.read(paths.stage_dir(recipe, stage)) for stage in recipe.stages}
    stages = {stage: body["seconds"] for stage, body in done.items() if body is not None}
    summary |= {"seconds": round(seconds, 2), "stages": stages}
    write_json(Path(recipe.out) / "summary.json", summary)
    return summary


def _rewards(recipe: Recipe, stage: str) -> Sequence[RewardSpec]:
    if stage == "score":
        return recipe.score.reward
    truth = judges.truth(recipe)
    held = {"train": [*truth, *recipe.score.reward], "evaluate": [*truth, *judges.proxy(recipe)]}
    return held.get(stage, [])
