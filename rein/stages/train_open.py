"""Opens what the training loop stands on: models, rows, reference, probe, validator; restores.

Part of stages/train.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rein.audit.whole import audit
from rein.config import paths
from rein.config.load import settled_by
from rein.config.methods import AUTO, needs
from rein.config.recipe import Recipe
from rein.config.rules import sums_over_vocabulary
from rein.data.audit.verdict import Verdict
from rein.data.loader import load_prompts, rejects_kept, write_rejects
from rein.data.tokenize import Encoder
from rein.errors import CheckpointError, DataError
from rein.experience import ExperienceMaker
from rein.model_files import weights_hash
from rein.models.actor import Actor, load_actor
from rein.models.critic import Critic, critic_on, load_critic
from rein.models.reference import Reference
from rein.probe import PROBE_ROWS
from rein.rewards import build, uses_model
from rein.runtime.clock import Clock
from rein.runtime.seeding import derive
from rein.scorer import open_scorer
from rein.snapshots import RunState, load
from rein.stages import token_records
from rein.stages.rounds import Round, current, held_out_file
from rein.stages.team import Team, make_engine, make_passes, make_probe, model_options, team_of
from rein.stages.tokens import compared, encoder_of
from rein.stages.tracked import trackers_of
from rein.stages.train_budget import with_budget
from rein.stages.train_frozen import Counts, recomputed, references
from rein.stages.train_job import Job
from rein.stages.train_rows import corrects, load_mixing, load_rows, score_statistics_of
from rein.stages.train_state import restore
from rein.tracking.console import Console
from rein.types import Prompt, Trajectory
from rein.validator import Validator

TRACE_KEPT = 0.5  # below, V-trace under `auto` is refused


def open_job(recipe: Recipe, console: Console, *, rehearsal: bool = False) -> Job:
    """Open models and rows, compute what is constant, restore the newest snapshot.

    A rehearsal restores and writes nothing.
    """
    clock, start = Clock(), paths.start_policy(recipe, "train")
    now, held = Round() if rehearsal else current(recipe), held_out_file(recipe)
    actor = _open_actor(recipe)
    encoder = encoder_of(actor, recipe)
    marks = compared(encoder, console, start, [*paths.train_files(recipe), *paths.mixed_files(recipe)])
    folder = paths.stage_dir(recipe, "train")
    audited = None
    if recipe.algorithm.method == AUTO:
        recipe, audited = _obey(recipe, console, actor, encoder, None if rehearsal else folder, now)
    wanted = needs(recipe)
    counts: Counts = {}
    kept = None if rehearsal else folder
    with clock("data"):
        rows = load_rows(
            recipe, console, encoder, kept,
            lambda some: recomputed(recipe, console, actor.tokenizer, some, counts, clock),
            held if now.number and held.exists() else None,
        )  # fmt: skip
        rows.demonstrations = load_mixing(recipe, console, encoder, rows.held_out, kept)
    rows.marks = marks
    with clock("budget"):
        recipe = with_budget(recipe, console, actor, rows.train, kept)
    critic = _critic(recipe, console, actor) if "critic" in wanted else None
    corrected = corrects(recipe, console, rows.train)
    referred = rows.train[:16] if rehearsal else rows.train
    reference = _reference(recipe, console, actor) if "reference" in wanted else None
    models = {"actor": actor} if critic is None else {"actor": actor, "critic": critic}
    team = team_of(recipe, models, _open_models, reference)
    passes = team.made("passes", make_passes)
    with clock("data"):
        said = references(recipe, console, actor, passes, referred, counts, clock)
    maker = ExperienceMaker(
        recipe,
        actor,
        critic,
        said,
        corrected=corrected,
        statistics=score_statistics_of(recipe, console, rows.train),
        reference=reference,
        passes=passes,
    )
    probe_rows = sorted(rows.held_out, key=lambda row: row.key)[:PROBE_ROWS]
    with clock("probe"):
        probe = team.made("probe", make_probe, probe_rows, recipe.actor.token_budget)
    validator = None if rehearsal else _validator(recipe, console, team, encoder, rows.held_out, folder)
    maker.clock = clock
    if validator is not None:
        validator.clock = clock
    job = Job(recipe, console, rows, _content(actor, critic), team, maker, probe, validator, clock, now)
    job.audited = audited
    job.cached = counts
    if not rehearsal:
        _resume(job)
        job.tracker = trackers_of(recipe, console, folder, job.cursor.number)
    return job


def _obey(
    recipe: Recipe, console: Console, actor: Actor, encoder: Encoder, folder: Path | None, now: Round
) -> tuple[Recipe, Verdict | None]:
    """The recipe that the audit's verdict asks for. Raises DataError where it says not to train.

    A later round obeys what the first one was told.
    """
    if now.obeyed:
        return settled_by(recipe, *now.obeyed)[0], None
    files = paths.train_files(recipe)
    with rejects_kept(folder and folder / "rejects.jsonl"):
        found = audit(recipe, files, actor, encoder)
    verdict = found.verdict
    for reason in verdict.reasons:
        console.say(f"audit: {reason.said}")
    if verdict.decision == "stop":
        why = "; ".join(reason.said for reason in verdict.reasons if reason.level == "stop")
        raise DataError(f"{files[0]}: the audit says not to train: {why}; mend the data, or name a method")
    kept = (found.model or {}).get("trace_kept", 1.0)
    if recipe.algorithm.adv_estimator == "vtrace" and kept < TRACE_KEPT:
        raise DataError(
            f"{files[0]}: too far from who wrote the rows for V-trace, which keeps {kept:.2f} of the reward "
            f"at the start of a row, {TRACE_KEPT} is needed; write algorithm.adv_estimator=gae"
        )
    recipe, notes = settled_by(recipe, verdict.method, verdict.settings)
    words = [verdict.method, *(f"{key}={_word(value)}" for key, value in verdict.settings.items())]
    console.say(f"algorithm.method: auto -> {' '.join(words)}")
    for note in notes:
        console.say(f"note: {note}")
    return recipe, verdict


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _content(actor: Actor, critic: Critic | None) -> str:
    """What actor and critic start from, by content: a resumed run must have begun from the same."""
    return " ".join(weights_hash(Path(model.path)) for model in (actor, critic) if model is not None)


def _open_models(recipe: Recipe, roles: Sequence[str] | None = None) -> dict[str, Actor | Critic]:
    """What this process opened, on another rank; `roles`: only these."""
    wanted = [role for role in ("actor", "critic") if roles is None or role in roles]
    models: dict[str, Actor | Critic] = {}
    if "actor" in wanted:
        models["actor"] = _open_actor(recipe)
    if "critic" in wanted and "critic" in needs(recipe):
        models["critic"] = _open_critic(recipe, models.get("actor"))
    return models


def _open_actor(recipe: Recipe) -> Actor:
    return load_actor(
        paths.start_policy(recipe, "train"),
        seed=derive(recipe.seed, "actor"),
        logits_chunk=recipe.model.logits_chunk,
        **model_options(recipe),
    )


def _open_critic(recipe: Recipe, actor: Actor | Critic | None) -> Critic:
    """A model of its own, or adapters and a head on the actor's trunk."""
    seed, options = derive(recipe.seed, "critic"), model_options(recipe)
    if not recipe.critic.model.share_trunk:
        return load_critic(paths.critic_start(recipe), seed=seed, **options)
    assert isinstance(actor, Actor)
    del options["dtype"], options["precision"]  # are the actor's
    return critic_on(actor, seed=seed, **options)


def _critic(recipe: Recipe, console: Console, actor: Actor) -> Critic:
    """The critic; says what it costs on the actor's trunk."""
    critic = _open_critic(recipe, actor)
    if recipe.critic.model.share_trunk:
        own = sum(parameter.nbytes for parameter in critic.model.parameters() if parameter.requires_grad)
        console.say(f"critic: adapters and a head on the actor's trunk, {own / 2**20:,.1f} MiB")
    return critic


def _reference(recipe: Recipe, console: Console, actor: Actor) -> Reference | None:
    """The start policy itself, where its log-probs of stored tokens are not enough; says what it costs."""
    if not sums_over_vocabulary(recipe):
        return None
    reference = Reference(actor)
    how = f"a frozen copy of the start policy, {reference.bytes / 2**20:,.0f} MiB"
    console.say(f"reference: {how if reference.bytes else 'the actor with its adapters off, no copy'}")
    return reference


def _validator(
    recipe: Recipe,
    console: Console,
    team: Team,
    encoder: Encoder,
    held_out: list[Trajectory],
    folder: Path,
) -> Validator | None:
    """Greedy answers to held-out prompts, scored by the truth and by the reward that trains; None where
    nothing may be generated.
    """
    if not recipe.evaluate.generate:
        return None
    truth, proxy = recipe.evaluate.reward or recipe.score.reward, recipe.score.reward
    if recipe.data.val_files:
        rejected = folder / "validation_rejects.jsonl"
        with rejects_kept(rejected):
            loaded = load_prompts(recipe.data.val_files, encoder, recipe.data)
        for note in loaded.notes:
            console.say(f"validation: {note}")
        write_rejects(rejected, loaded.rejects)
        prompts = loaded.rows
    else:
        by_group = {row.group: row for row in held_out}
        prompts = [
            Prompt(row.where, row.messages, row.prompt_ids, row.ground_truth, row.data_source, row.extra_info)
            for row in by_group.values()
        ]
    if len(prompts) > recipe.trainer.val_prompts:
        kept = f"the first {recipe.trainer.val_prompts} of {len(prompts)} prompts (trainer.val_prompts)"
        console.say(f"validation: {kept}")
    prompts = prompts[: recipe.trainer.val_prompts]
    scorer = None
    if uses_model([*truth, *proxy]):
        scorer = open_scorer(recipe)
    engine = team.made("engine", make_engine, recipe.rollout.batch_size, recipe.rollout.stop)
    room = recipe.rollout.max_new_tokens or recipe.data.max_response_length
    judges = [build(specs, scorer=scorer) for specs in ([truth] if proxy == truth else [truth, proxy])]
    for note in dict.fromkeys(note for judge in judges for note in judge.notes):
        console.say(f"validation: {note}")
    return Validator(
        engine,
        judges[0],
        judges[1] if len(judges) > 1 else None,
        prompts,
        decode=encoder.decode_response,
        max_new_tokens=room,
    )


def _resume(job: Job) -> None:
    """By `resume`: auto takes the newest whole snapshot, never clears them, a path names one."""
    wanted = job.recipe.resume
    if wanted == "never":
        _start_anew(job)
        return
    if wanted != "auto":
        if not restore(job, _named(wanted)):
            raise CheckpointError(
                f"resume: {wanted} was made with other rows or settings; use the recipe that made it"
            )
        job.snapshots.drop_after(job.cursor.number)
    else:
        state, passed_over = job.snapshots.newest()
        for line in passed_over:
            job.console.say(f"resume: {line} passed over")
        if state is None and job.round.number:
            raise CheckpointError(
                f"{job.snapshots.folder}: no snapshot is left of the run that asked for round "
                f"{job.round.number}; begin anew with resume=never"
            )
        if state is None or not restore(job, state):
            _start_anew(job)
            return
        job.snapshots.drop_after(job.cursor.number)  # broken ones, or they would count as the newest
    job.console.say(f"resume: from update {job.cursor.done} of {job.total_updates}")


def _start_anew(job: Job) -> None:
    """Nothing of an earlier run in this folder holds."""
    job.snapshots.clear()
    job.reins.journal.clear()
    token_records.drop_undone(job)


def _named(wanted: str) -> RunState:
    """The snapshot at a path. Raises CheckpointError for what is none, or one of another stage."""
    advice = "give a folder such as out/train/snapshots/step-100, or write resume=auto"
    try:
        return load(Path(wanted), kind="train")
    except CheckpointError as error:
        raise CheckpointError(f"resume: {error}; {advice}") from error
