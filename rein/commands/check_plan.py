"""What each stage of a recipe will read and do, in rows, steps and tokens. Part of commands/check.py.

Opens data through the one loader, with the tokenizer alone; what an earlier stage will make is reckoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from rein.commands.check_packs import Pack, largest_pack
from rein.commands.check_rounds import rounds_of
from rein.config import paths
from rein.config.methods import needs, reads_scores
from rein.config.recipe import Recipe
from rein.data.fast_tokenizer import open_fast_tokenizer
from rein.data.groups import longest_group, refuse_lacking, select
from rein.data.loader import Loaded, load_demonstrations, load_pairs, load_prompts, load_trajectories
from rein.data.split import held_prompts, holdout, prompt_key
from rein.data.tokenize import Encoder
from rein.errors import ConfigError
from rein.model_files import read_json, stop_ids_of
from rein.protocols import Tokenizer
from rein.runtime.seeding import derive


@dataclass(frozen=True, slots=True)
class Plan:
    """One stage. Token counts are of prompt + response; `longest` decides what a micro-batch must hold."""

    stage: str
    rows_in: int | None = None  # None: not known before an earlier stage is done
    left_out: int | None = None
    used: int | None = None
    made_by: str = ""  # the stage that will make the rows
    mean_tokens: float = 0.0
    longest: int = 0
    mean_prompt: float = 0.0  # tokens of its prompt
    prompts: int = 0
    held: int = 0  # of train: rows that are held out
    held_prompts: int = 0
    pack: Pack | None = None  # of train, where its rows are there: the largest micro-batch
    batches: int = 0  # of train
    trainable: int | None = None  # of rows that score reads: what the hold-out leaves; None: not counted
    work: str = ""  # what it does, in words
    tokens: float = 0.0  # that go through a model
    notes: tuple[str, ...] = ()


def plan_all(recipe: Recipe, encoder: Encoder) -> dict[str, Plan]:
    """A plan for each stage of the recipe, in order; raises what the stages would on reading their data."""
    plans: dict[str, Plan] = {}
    for stage in recipe.stages:
        planner = _PLANNERS.get(stage)
        plans[stage] = planner(recipe, encoder, plans) if planner else Plan(stage, work=_WORDS[stage])
    return plans


def open_encoder(recipe: Recipe, folder: Path) -> Encoder:
    """The tokenizer of the start model, opened without transformers where that can be."""
    tokenizer: Tokenizer | None = open_fast_tokenizer(folder, "model.path")
    if tokenizer is None:
        from rein.models.load import load_tokenizer

        tokenizer = load_tokenizer(str(folder), trust_remote_code=recipe.model.trust_remote_code)
    return Encoder(
        tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=stop_ids_of(folder),
        vocab_size=read_json(folder / "config.json").get("vocab_size"),
    )


def _sft(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    sft, files = recipe.sft, paths.sft_files(recipe)
    loaded = load_demonstrations(
        files, encoder, recipe.data, prompt_key=sft.prompt_key, response_key=sft.response_key
    )
    plan = _counted("sft", loaded, loaded.rows)
    _fits("sft.batch_size", sft.batch_size, loaded.rows, files)
    steps = sft.total_steps or sft.epochs * ceil(len(loaded.rows) / sft.batch_size)
    return _worked(plan, f"{steps} steps of {sft.batch_size} rows", steps * sft.batch_size * plan.mean_tokens)


def _reward(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    reward, files = recipe.reward, paths.reward_files(recipe)
    loaded = load_pairs(files, encoder, recipe.data)
    train, _ = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.data_seed, "holdout"))
    plan = _counted("reward", loaded, train)
    _fits("reward.batch_size", reward.batch_size, train, files)
    steps = reward.epochs * ceil(len(train) / reward.batch_size)
    return _worked(
        plan, f"{steps} steps of {reward.batch_size} pairs", steps * reward.batch_size * plan.mean_tokens
    )


def _rollout(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    rollout = recipe.rollout
    loaded = load_prompts(paths.rollout_files(recipe), encoder, recipe.data)
    prompts = loaded.rows[: rollout.max_prompts]
    plan = _counted("rollout", loaded, prompts)
    room = rollout.max_new_tokens or recipe.data.max_response_length
    plan = replace(
        plan, longest=plan.longest + room, prompts=len({prompt_key(p.prompt_ids) for p in prompts})
    )
    work = f"{len(prompts)} prompts x {rollout.n} = {len(prompts) * rollout.n} answers of up to {room} tokens"
    return _worked(plan, work, len(prompts) * rollout.n * (plan.mean_tokens + room))


def _score(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    names = " + ".join(spec.name for spec in recipe.score.reward)
    made = _made_rows(recipe, plans, "score")
    if made is not None:
        return _worked(made, f"by {names}", made.tokens)
    loaded = load_trajectories(paths.score_files(recipe), encoder, recipe.data, scored=False)
    train, _ = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.data_seed, "holdout"))
    plan = replace(_counted("score", loaded, loaded.rows), trainable=len(train))
    return _worked(plan, f"by {names}", len(loaded.rows) * plan.mean_tokens)


def _train(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    made = _made_rows(recipe, plans, "train")
    if made is not None:
        prompts = held_prompts(made.prompts, recipe.data.holdout_fraction)
        held = prompts * recipe.rollout.n
        rows = (made.used or 0) - held if made.trainable is None else made.trainable
        plan = replace(made, used=rows, held=(made.used or 0) - rows, held_prompts=prompts)
    else:
        files, paired = paths.train_files(recipe), "pairs" in needs(recipe)
        loaded = load_trajectories(files, encoder, recipe.data, scored=reads_scores(recipe), ranked=paired)
        refuse_lacking(recipe, files[0], loaded.rows)
        train, held_out = holdout(
            loaded.rows, recipe.data.holdout_fraction, derive(recipe.data_seed, "holdout")
        )
        threshold, spread = recipe.algorithm.filter_threshold, recipe.algorithm.filter_groups.enable
        train, _ = select(train, files[0], threshold=threshold, spread=spread, paired=paired)
        longest_group(recipe, train)
        apart = len({prompt_key(row.prompt_ids) for row in held_out})
        plan = replace(_counted("train", loaded, train), held=len(held_out), held_prompts=apart)
        plan, rows = replace(plan, pack=largest_pack(recipe, train)), len(train)
    algorithm = recipe.algorithm
    selects = algorithm.filter_threshold is not None or algorithm.filter_groups.enable
    selects = selects or "pairs" in needs(recipe)  # how many rows will be left is not known yet
    if recipe.data.train_batch_size > rows and not (made and selects) and recipe.trainer.refresh_every < 1:
        raise ConfigError(
            f"data.train_batch_size {recipe.data.train_batch_size} is larger than the {rows} rows to train "
            f"on; set it to {rows} or less, or give more prompts (data.holdout_fraction holds back 64)"
        )
    work, passes, notes = _updates(recipe, rows)
    notes += (*_mixed(recipe, encoder), *rounds_of(recipe, encoder, _batches(recipe, rows)))
    if recipe.data.val_files:
        given = load_prompts(recipe.data.val_files, encoder, recipe.data)
        notes = (
            *notes,
            f"validation on {min(len(given.rows), recipe.trainer.val_prompts)} prompts of data.val_files",
        )
    plan = _worked(plan, work, passes * plan.mean_tokens)
    return replace(plan, batches=_batches(recipe, rows), notes=(*plan.notes, *notes))


def _mixed(recipe: Recipe, encoder: Encoder) -> tuple[str, ...]:
    """What sft.share adds to the actor's updates; raises what train will on reading its files."""
    sft, files = recipe.sft, paths.mixed_files(recipe)
    if not files:
        return ()
    loaded = load_demonstrations(
        files, encoder, recipe.data, prompt_key=sft.prompt_key, response_key=sft.response_key
    )
    beside = sft.share * recipe.actor.ppo_mini_batch_size
    return (f"sft.share {sft.share:g}: {beside:.3g} of {len(loaded.rows)} demonstrations to an actor update",)


def _batches(recipe: Recipe, rows: int) -> int:
    trainer = recipe.trainer
    return trainer.total_training_steps or trainer.total_epochs * ceil(rows / recipe.data.train_batch_size)


def _updates(recipe: Recipe, rows: int) -> tuple[str, float, tuple[str, ...]]:
    """What training does in words, how many rows go through a model in it, and what each batch size means."""
    data, actor, critic, trainer = recipe.data, recipe.actor, recipe.critic, recipe.trainer
    batches = _batches(recipe, rows)
    per_batch = min(data.train_batch_size, rows)
    sizes = {"actor": (actor.ppo_mini_batch_size, actor.ppo_epochs)}
    if "critic" in needs(recipe):
        sizes["critic"] = (
            critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            critic.ppo_epochs or actor.ppo_epochs,
        )
    notes = [
        f"data.train_batch_size {data.train_batch_size} rows: {batches} batches, of an epoch of {rows} rows; "
        "old log-probs, values and advantages are made once for each batch"
    ]
    passed = float(batches * per_batch * len(sizes))
    for role, (mini, epochs) in sizes.items():
        steps = ceil(per_batch / mini) * epochs
        notes.append(
            f"{role}.ppo_mini_batch_size {mini} rows: {ceil(per_batch / mini)} updates x {epochs} PPO epochs "
            f"= {steps} a batch, {steps * batches} in all"
        )
        passed += 3 * batches * per_batch * epochs  # a backward pass costs two forward ones
    if "critic" in sizes and trainer.critic_warmup:
        notes.append(
            f"trainer.critic_warmup: up to {trainer.critic_warmup} critic updates before the actor moves"
        )
        passed += 3 * trainer.critic_warmup * sizes["critic"][0]
    if actor.use_dynamic_bsz:
        notes.append(
            f"actor.ppo_max_token_len_per_gpu {actor.ppo_max_token_len_per_gpu}: tokens computed together"
        )
    else:
        notes.append(f"actor.ppo_micro_batch_size {actor.ppo_micro_batch_size} rows are computed together")
    return f"{batches} batches of {per_batch} rows", passed, tuple(notes)


def _evaluate(recipe: Recipe, encoder: Encoder, plans: dict[str, Plan]) -> Plan:
    loaded = load_prompts(paths.evaluate_files(recipe), encoder, recipe.data)
    prompts = loaded.rows[: recipe.evaluate.max_prompts]
    plan = _counted("evaluate", loaded, prompts)
    room = recipe.rollout.max_new_tokens or recipe.data.max_response_length
    plan = replace(plan, longest=plan.longest + room)
    answers = 2 * len(prompts) * (1 + recipe.evaluate.pass_k)
    work = f"{len(prompts)} prompts, before and after: greedy and {recipe.evaluate.pass_k} samples"
    return _worked(plan, work, answers * (plan.mean_tokens + room))


_PLANNERS = {
    "sft": _sft,
    "reward": _reward,
    "rollout": _rollout,
    "score": _score,
    "train": _train,
    "evaluate": _evaluate,
}
_WORDS = {"export": "a Hugging Face folder", "report": "one HTML page"}


def _counted(stage: str, loaded: Loaded[Any], used: Sequence[Any]) -> Plan:
    lengths = [_length(row) for row in used]
    return Plan(
        stage,
        rows_in=loaded.total,
        left_out=len(loaded.rejects),
        used=len(used),
        mean_tokens=sum(lengths) / max(len(lengths), 1),
        longest=max(lengths, default=0),
        mean_prompt=sum(len(row.prompt_ids) for row in used) / max(len(used), 1),
        notes=tuple(loaded.notes),
    )


def _length(row: Any) -> int:
    """Tokens of a row of any kind; of a pair, both sides."""
    prompt = len(row.prompt_ids)
    if hasattr(row, "chosen_ids"):
        return 2 * prompt + len(row.chosen_ids) + len(row.rejected_ids)
    return prompt + len(getattr(row, "response_ids", ()))


def _worked(plan: Plan, work: str, tokens: float) -> Plan:
    return replace(plan, work=work, tokens=tokens)


def _made_rows(recipe: Recipe, plans: dict[str, Plan], stage: str) -> Plan | None:
    """The rows that rollout will have made for this stage; None where its files are there already."""
    files = paths.score_files(recipe) if stage == "score" else paths.train_files(recipe)
    maker = next(
        (name for name in ("score", "rollout") if str(paths.stage_dir(recipe, name)) in files[0]), None
    )
    if maker is None or maker not in plans:
        return None
    if "rollout" not in plans:  # score reads files of the user's: as many rows as it was given
        return replace(plans["score"], stage=stage, made_by=maker)
    rollout = plans["rollout"]
    rows = (rollout.used or 0) * recipe.rollout.n
    return Plan(
        stage,
        rows_in=rows,
        left_out=0,
        used=rows,
        made_by=maker,
        mean_tokens=rollout.tokens / max(rows, 1),
        longest=rollout.longest,
        mean_prompt=rollout.mean_prompt,
        prompts=rollout.prompts,
        tokens=rollout.tokens,
    )


def _fits(key: str, size: int, rows: Sequence[Any], files: Sequence[str]) -> None:
    if size > len(rows):
        raise ConfigError(
            f"{key} {size} is larger than the {len(rows)} rows of {files[0]} to train on; lower it"
        )
