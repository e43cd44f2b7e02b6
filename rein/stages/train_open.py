"""Opens what the training loop stands on: models, rows, reference, probe, validator; restores.

Part of stages/train.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rein.config import paths
from rein.config.methods import METHODS, Method
from rein.config.recipe import Recipe
from rein.config.rules import sums_over_vocabulary
from rein.data.batches import over_budget_note
from rein.data.cache import ScoreCache
from rein.data.loader import load_demonstrations, load_prompts, load_trajectories, write_rejects
from rein.data.mixing import Mixing
from rein.data.split import holdout, prompt_key
from rein.data.tokenize import Encoder
from rein.engines.hf import HfEngine
from rein.errors import CheckpointError, ConfigError, DataError
from rein.experience import ExperienceMaker, reference_log_probs
from rein.functional.rewards import score_statistics
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.load import weights_hash
from rein.models.reference import Reference
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
    method = METHODS[recipe.algorithm.method]
    start = paths.start_policy(recipe, "train")
    actor = load_actor(start, seed=derive(recipe.seed, "actor"), **_model_options(recipe))
    encoder = Encoder(
        actor.tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=set(actor.stop_ids),
        vocab_size=actor.vocabulary,
    )
    folder = paths.stage_dir(recipe, "train")
    rows = _load_rows(recipe, console, encoder, method, None if rehearsal else folder)
    rows.demonstrations = _demonstrations(
        recipe, console, encoder, rows.held_out, None if rehearsal else folder
    )
    critic = None
    if method.critic:
        options = _model_options(recipe)
        critic = load_critic(paths.critic_start(recipe), seed=derive(recipe.seed, "critic"), **options)
    corrected = _corrected(recipe, console, method, rows.train)
    references = _references(recipe, console, method, actor, rows.train[:16] if rehearsal else rows.train)
    maker = ExperienceMaker(
        recipe,
        method,
        actor,
        critic,
        references,
        corrected=corrected,
        statistics=_score_statistics(recipe, console, rows.train),
        reference=_reference(recipe, console, actor) if references is not None else None,
    )
    budget = recipe.actor.ppo_max_token_len_per_gpu
    probe_rows = sorted(rows.held_out, key=lambda row: row.key)[:PROBE_ROWS]
    probe = Probe(actor, probe_rows, budget)
    validator = None if rehearsal else _validator(recipe, console, actor, encoder, rows.held_out)
    job = Job(recipe, console, method, rows, actor, critic, maker, probe, validator)
    if not rehearsal:
        _resume(job)
        job.tracker = open_trackers(recipe.trainer.logger, folder, from_number=job.cursor.number)
    return job


def _model_options(recipe: Recipe) -> dict[str, Any]:
    return recipe.model.model_dump(exclude={"path"})


def _load_rows(
    recipe: Recipe, console: Console, encoder: Encoder, method: Method, folder: Path | None
) -> Rows:
    files = paths.train_files(recipe)
    loaded = load_trajectories(files, encoder, recipe.data, scored=True)
    for note in loaded.notes:
        console.say(f"data: {note}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_rejects(folder / "rejects.jsonl", loaded.rejects)
    train, held_out = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.seed, "holdout"))
    counts = {"in": loaded.total, "rejected": len(loaded.rejects), "held_out": len(held_out)}
    if method.filters:
        threshold = recipe.algorithm.filter_threshold
        kept = [row for row in train if row.score is not None and row.score >= threshold]
        counts["filtered"] = len(train) - len(kept)
        train = kept
        if not train:
            raise DataError(
                f"{files[0]}: no row scores {threshold} or more; lower algorithm.filter_threshold"
            )
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
    if recipe.data.train_batch_size > len(train):
        raise ConfigError(
            f"data.train_batch_size {recipe.data.train_batch_size} is larger than the {len(train)} rows "
            f"to train on ({said}); set it to {len(train)} or less"
        )
    return Rows(train, held_out, counts)


def _demonstrations(
    recipe: Recipe, console: Console, encoder: Encoder, held_out: list[Trajectory], folder: Path | None
) -> Mixing | None:
    """What sft.share takes from, less the answers to prompts that are held out; None where it is off."""
    sft, files = recipe.sft, paths.mixed_files(recipe)
    if not files:
        return None
    loaded = load_demonstrations(
        files, encoder, recipe.data, prompt_key=sft.prompt_key, response_key=sft.response_key
    )
    for note in loaded.notes:
        console.say(f"sft.files: {note}")
    if folder is not None:
        write_rejects(folder / "demonstrations_rejects.jsonl", loaded.rejects)
    held = {prompt_key(row.prompt_ids) for row in held_out}
    rows = [row for row in loaded.rows if prompt_key(row.prompt_ids) not in held]
    if not rows:
        raise DataError(f"{files[0]}: every prompt of sft.files is held out; give other demonstrations")
    console.say(
        f"sft.share {sft.share:g}: {loaded.total} demonstrations in, {len(loaded.rejects)} rejected, "
        f"{len(loaded.rows) - len(rows)} of held-out prompts, {len(rows)} mixed in"
    )
    return Mixing(rows, sft.share, seed=derive(recipe.seed, "demonstrations"), shuffle=recipe.data.shuffle)


def _corrected(recipe: Recipe, console: Console, method: Method, rows: list[Trajectory]) -> bool:
    """Whether tokens are weighed by old / behavior; `auto` follows the data, and says so."""
    wanted = recipe.algorithm.rollout_correction.rollout_is
    known = sum(row.behavior_log_probs is not None for row in rows)
    if wanted is None or not method.corrects:
        return False
    if 0 < known < len(rows):
        raise DataError(
            f"{paths.train_files(recipe)[0]}: {len(rows) - known} of {len(rows)} rows have no "
            "behavior_log_probs; leave those rows out, or set data.behavior=unknown"
        )
    if known:
        console.say(
            f"rollout_correction: {wanted} -> token weights old / behavior, truncated at "
            f"{recipe.algorithm.rollout_correction.rollout_is_threshold}"
        )
        return True
    if wanted == "token":
        raise DataError(
            f"{paths.train_files(recipe)[0]}: algorithm.rollout_correction.rollout_is=token needs "
            "behavior_log_probs, which the rows do not have; set it to null or auto"
        )
    console.say("rollout_correction: auto -> none, the behavior policy is unknown")
    return False


def _score_statistics(recipe: Recipe, console: Console, rows: list[Trajectory]) -> tuple[float, float] | None:
    """Mean and spread of all training scores, made once: what reward_manager.normalize divides by."""
    if recipe.reward_manager.normalize is None:
        return None
    found = score_statistics(torch.tensor([float(row.score or 0.0) for row in rows], dtype=torch.float64))
    console.say(f"reward_manager.normalize: scores have mean {found[0]:.4g} and std {found[1]:.4g}")
    return found


def _references(
    recipe: Recipe, console: Console, method: Method, actor: Actor, rows: list[Trajectory]
) -> dict[str, Any] | None:
    """Reference log-probs of every row; the actor still is the reference: just loaded, nothing restored."""
    kl_on = recipe.actor.use_kl_loss or recipe.algorithm.use_kl_in_reward
    if not (method.reference and kl_on):
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


def _reference(recipe: Recipe, console: Console, actor: Actor) -> Reference | None:
    """The start policy itself, where its log-probs of stored tokens are not enough; says what it costs."""
    if not sums_over_vocabulary(recipe):
        return None
    reference = Reference(actor)
    how = f"a frozen copy of the start policy, {reference.bytes / 2**20:,.0f} MiB"
    console.say(f"reference: {how if reference.bytes else 'the actor with its adapters off, no copy'}")
    return reference


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
