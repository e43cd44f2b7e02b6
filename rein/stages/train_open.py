"""Opens what the training loop stands on: models, rows, reference, probe, validator; restores.

Part of stages/train.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rein.config import paths
from rein.config.methods import DATA_NEEDS, methods_for, needs
from rein.config.recipe import Recipe
from rein.data.batches import over_budget_note
from rein.data.cache import ScoreCache
from rein.data.groups import by_prompt, select
from rein.data.loader import load_prompts, load_trajectories, write_rejects
from rein.data.split import holdout
from rein.data.tokenize import Encoder
from rein.engines.hf import HfEngine
from rein.errors import CheckpointError, ConfigError, DataError
from rein.experience import ExperienceMaker, reference_log_probs
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.load import weights_hash
from rein.probe import PROBE_ROWS, Probe
from rein.rewards import build, uses_model
from rein.runtime.seeding import derive
from rein.scorer import open_scorer
from rein.snapshots import load
from rein.stages.train_job import Job, Rows
from rein.tracking.console import Console
from rein.tracking.fanout import open_trackers
from rein.types import Prompt, Trajectory
from rein.validator import Validator


def open_job(recipe: Recipe, console: Console, *, rehearsal: bool = False) -> Job:
    """Open models and rows, compute what is constant, restore the newest snapshot.

    A rehearsal restores and writes nothing.
    """
    wanted = needs(recipe)
    start = paths.start_policy(recipe, "train")
    actor = load_actor(start, seed=derive(recipe.seed, "actor"), **_model_options(recipe))
    encoder = Encoder(
        actor.tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=set(actor.stop_ids),
        vocab_size=actor.vocabulary,
    )
    folder = paths.stage_dir(recipe, "train")
    rows = _load_rows(recipe, console, encoder, None if rehearsal else folder)
    critic = None
    if "critic" in wanted:
        options = _model_options(recipe)
        critic = load_critic(paths.critic_start(recipe), seed=derive(recipe.seed, "critic"), **options)
    corrected = _corrected(recipe, console, rows.train)
    references = _references(recipe, console, actor, rows.train[:16] if rehearsal else rows.train)
    maker = ExperienceMaker(recipe, actor, critic, references, corrected=corrected)
    budget = recipe.actor.ppo_max_token_len_per_gpu
    probe_rows = sorted(rows.held_out, key=lambda row: row.key)[:PROBE_ROWS]
    probe = Probe(actor, probe_rows, budget)
    validator = None if rehearsal else _validator(recipe, console, actor, encoder, rows.held_out)
    job = Job(recipe, console, rows, actor, critic, maker, probe, validator)
    if not rehearsal:
        _resume(job)
        job.tracker = open_trackers(recipe.trainer.logger, folder, from_number=job.cursor.number)
    return job


def _model_options(recipe: Recipe) -> dict[str, Any]:
    return recipe.model.model_dump(exclude={"path"})


def _load_rows(recipe: Recipe, console: Console, encoder: Encoder, folder: Path | None) -> Rows:
    files = paths.train_files(recipe)
    loaded = load_trajectories(files, encoder, recipe.data, scored=True, ranked="pairs" in needs(recipe))
    for note in loaded.notes:
        console.say(f"data: {note}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_rejects(folder / "rejects.jsonl", loaded.rejects)
    train, held_out = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.seed, "holdout"))
    counts = {"in": loaded.total, "rejected": len(loaded.rejects), "held_out": len(held_out)}
    _serves(recipe, files[0], loaded.rows)
    train, left_out = select(
        train,
        files[0],
        threshold=recipe.algorithm.filter_threshold,
        spread=recipe.algorithm.filter_groups.enable,
        paired="pairs" in needs(recipe),
    )
    counts |= left_out
    counts["trained"] = len(train)
    if recipe.actor.use_dynamic_bsz:
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in train]
        budget = recipe.actor.ppo_max_token_len_per_gpu
        for note in over_budget_note(
            [row.where for row in train], lengths, budget, "actor.ppo_max_token_len_per_gpu"
        ):
            console.say(f"warning: {note}")
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    console.say(f"rows: {said}")
    if folder is not None and recipe.data.train_batch_size > len(train):
        raise ConfigError(
            f"data.train_batch_size {recipe.data.train_batch_size} is larger than the {len(train)} rows "
            f"to train on ({said}); set it to {len(train)} or less"
        )
    return Rows(train, held_out, counts)


def _has(rows: list[Trajectory]) -> frozenset[str]:
    """Which of DATA_NEEDS all rows meet (of groups and pairs: whether there are any)."""
    groups = by_prompt(rows)
    met = {
        "behavior": all(row.behavior_log_probs is not None for row in rows),
        "groups": any(len(group) > 1 for group in groups),
        "baseline_score": all(row.baseline_score is not None for row in rows),
        "pairs": any(len({rows[i].score for i in group}) > 1 for group in groups),
    }
    return frozenset(name for name, value in met.items() if value)


def _serves(recipe: Recipe, file: str, rows: list[Trajectory]) -> None:
    """Raise DataError where the recipe asks for what the rows do not have, with the methods they serve."""
    has = _has(rows)
    lacking = [name for name in DATA_NEEDS if name in needs(recipe) - has]
    if lacking:
        partly = ""
        if "behavior" in lacking:
            without = sum(row.behavior_log_probs is None for row in rows)
            partly = f" ({without} of {len(rows)} rows have none)"
        raise DataError(
            f"{file}: this recipe needs {DATA_NEEDS[lacking[0]]}{partly}; store them, or choose what the "
            f"rows can serve with algorithm.method={'|'.join(methods_for(has))} and rollout_is=null or auto"
        )


def _corrected(recipe: Recipe, console: Console, rows: list[Trajectory]) -> bool:
    """Whether old / behavior weighs or rejects tokens; `auto` follows the data, and says so."""
    wanted = recipe.algorithm.rollout_correction
    if wanted.bypass_mode:
        console.say(f"rollout_correction: bypass mode, {wanted.loss_type} against the behavior policy")
        return True
    if wanted.rollout_is is None and wanted.rollout_rs is None:
        return False
    known = sum(row.behavior_log_probs is not None for row in rows)
    if 0 < known < len(rows):
        raise DataError(
            f"{paths.train_files(recipe)[0]}: {len(rows) - known} of {len(rows)} rows have no "
            "behavior_log_probs; leave those rows out, or set data.behavior=unknown"
        )
    if not known:
        console.say("rollout_correction: auto -> none, the behavior policy is unknown")
        return False
    said = []
    if wanted.rollout_is is not None:
        level = "token" if wanted.rollout_is == "auto" else wanted.rollout_is
        bound = f"truncated at {wanted.rollout_is_threshold}"
        if isinstance(wanted.rollout_is_threshold, str):
            bound = f"0 outside {wanted.rollout_is_threshold.replace('_', ' to ')}"
        said.append(f"{wanted.rollout_is} -> {level} weights old / behavior, {bound}")
    if wanted.rollout_rs is not None:
        said.append(f"rejection by {wanted.rollout_rs} at {wanted.rollout_rs_threshold}")
    console.say(f"rollout_correction: {'; '.join(said)}")
    return True


def _references(
    recipe: Recipe, console: Console, actor: Actor, rows: list[Trajectory]
) -> dict[str, Any] | None:
    """Reference log-probs of every row; the actor still is the reference: just loaded, nothing restored."""
    if "reference" not in needs(recipe):
        return None
    key = f"{weights_hash(Path(actor.path))}/{recipe.model.dtype}"
    cache = ScoreCache(paths.cache_dir(recipe), "ref_log_probs", key)
    budget = recipe.actor.ppo_max_token_len_per_gpu
    missing = len({row.key for row in rows if cache.get(row.key) is None})
    if not missing:
        console.say(f"reference log-probs: {len(rows)} rows from the cache")
        return reference_log_probs(rows, actor, cache, budget, lambda _: None)
    with console.progress(missing, "reference log-probs") as advance:
        return reference_log_probs(rows, actor, cache, budget, advance)


def _validator(
    recipe: Recipe, console: Console, actor: Actor, encoder: Encoder, held_out: list[Trajectory]
) -> Validator | None:
    """Greedy answers to held-out prompts, scored by the truth and by the reward that trains."""
    truth, proxy = recipe.evaluate.reward or recipe.score.reward, recipe.score.reward
    if recipe.data.val_files:
        loaded = load_prompts(recipe.data.val_files, encoder, recipe.data)
        for note in loaded.notes:
            console.say(f"validation: {note}")
        prompts = loaded.rows
    else:
        by_group = {row.group: row for row in held_out}
        prompts = [
            Prompt(row.where, row.messages, row.prompt_ids, row.ground_truth, row.data_source, row.extra_info)
            for row in by_group.values()
        ]
    prompts = prompts[: recipe.trainer.val_prompts]
    scorer = None
    if uses_model([*truth, *proxy]):
        scorer = open_scorer(paths.reward_model(recipe), paths.cache_dir(recipe))
    engine = HfEngine(
        actor.model,
        actor.tokenizer,
        actor.stop_ids,
        batch_size=recipe.rollout.batch_size,
        stop_texts=recipe.rollout.stop,
    )
    room = recipe.rollout.max_new_tokens or recipe.data.max_response_length
    return Validator(
        engine,
        build(truth, scorer=scorer),
        build(proxy, scorer=scorer) if proxy != truth else None,
        prompts,
        decode=encoder.decode_response,
        max_new_tokens=room,
    )


def _resume(job: Job) -> None:
    """By `resume`: auto takes the newest whole snapshot, never clears them, a path names one."""
    wanted = job.recipe.resume
    if wanted == "never":
        job.snapshots.clear()
        return
    if wanted != "auto":
        if not job.restore(load(Path(wanted))):
            raise CheckpointError(
                f"resume: {wanted} was made with other rows or settings; use the recipe that made it"
            )
        job.snapshots.drop_after(job.cursor.number)
    else:
        state, passed_over = job.snapshots.newest()
        for line in passed_over:
            job.console.say(f"resume: {line} passed over")
        if state is None:
            return
        if not job.restore(state):
            job.snapshots.clear()
            return
    job.console.say(f"resume: from update {job.cursor.number} of {job.total_updates}")
