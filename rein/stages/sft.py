"""Causal LM fine-tuning on stored responses: prompt + response or chat messages in, a model folder out.

The loss is the negative log-likelihood of response tokens only, over the counted tokens of the whole batch.
Writes sft/model, sft/metrics.jsonl and manifest.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.batches import epoch_order, over_budget_note, row_batches, turns_of
from rein.data.loader import load_demonstrations, rejects_kept, write_rejects
from rein.data.tokenize import Encoder
from rein.errors import ConfigError
from rein.experience import padded
from rein.functional.losses.aggregate import aggregate
from rein.functional.losses.imitation import negative_log_likelihood
from rein.model_files import weights_hash
from rein.models.actor import Actor, load_actor
from rein.protocols import Mesh
from rein.runtime.seeding import derive
from rein.runtime.single import SINGLE
from rein.stages.supervised import LOSS_KEY, TOKENS_KEY, Pupil, descend, forget, ones, rows_mark
from rein.stages.team import model_options, team_of
from rein.stages.tokens import FACT, compared, encoder_of
from rein.tracking.console import Console
from rein.types import Demonstration, Metrics


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Fine-tune model.path on sft.files."""
    sft, folder = recipe.sft, paths.stage_dir(recipe, "sft")
    actor = _open(recipe)["actor"]
    encoder = encoder_of(actor, recipe)
    marks = compared(encoder, console, paths.base_model(recipe), paths.sft_files(recipe))
    rows, counts = _load_rows(recipe, console, encoder)
    per_epoch = -(-len(rows) // sft.batch_size)
    total = sft.total_steps or sft.epochs * per_epoch
    team = team_of(recipe, {"actor": actor}, _open)
    pupil = team.made(
        "pupil", Pupil, "actor", sft_backward, sft.optim,
        grad_clip=sft.grad_clip, total=total, budget=sft.ppo_max_token_len_per_gpu,
    )  # fmt: skip

    def rows_of(step: int) -> list[Demonstration]:
        order = epoch_order(len(rows), recipe.data_seed, step // per_epoch, recipe.data.shuffle)
        begin = (step % per_epoch) * sft.batch_size
        return [rows[i] for i in order[begin : begin + sft.batch_size]]

    metrics = descend(
        team,
        pupil,
        rows_of,
        recipe=recipe,
        console=console,
        folder=folder,
        what="sft",
        total=total,
        save_freq=sft.save_freq,
        settings={
            "model": recipe.model.model_dump(exclude={"path"}) | {"start": weights_hash(Path(actor.path))},
            "sft": sft.model_dump(exclude={"save_freq", "share", "coef"}),
            "seed": [recipe.seed, recipe.data_seed],
            "rows": rows_mark([row.prompt_ids.tobytes() + row.response_ids.tobytes() for row in rows]),
        },
    )
    team.files.save("actor", folder / "model")
    forget(folder)
    return {"rows": counts, "steps": total, "metrics": metrics, FACT: marks}


def _open(recipe: Recipe) -> dict[str, Actor]:
    """The model that is trained."""
    options = model_options(recipe) | {"logits_chunk": recipe.model.logits_chunk}
    return {"actor": load_actor(paths.base_model(recipe), seed=derive(recipe.seed, "sft"), **options)}


def _load_rows(
    recipe: Recipe, console: Console, encoder: Encoder
) -> tuple[list[Demonstration], dict[str, int]]:
    sft, files, folder = recipe.sft, paths.sft_files(recipe), paths.stage_dir(recipe, "sft")
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_demonstrations(
            files, encoder, recipe.data, prompt_key=sft.prompt_key, response_key=sft.response_key
        )
    for note in loaded.notes:
        console.say(f"data: {note}")
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    rows = loaded.rows
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    budget = sft.ppo_max_token_len_per_gpu
    for note in over_budget_note(
        [row.where for row in rows], lengths, budget, "sft.ppo_max_token_len_per_gpu"
    ):
        console.say(f"warning: {note}")
    console.say(f"rows: {loaded.total} in, {len(loaded.rejects)} rejected, {len(rows)} trained")
    if sft.batch_size > len(rows):
        raise ConfigError(
            f"sft.batch_size {sft.batch_size} is larger than the {len(rows)} rows of {files[0]}; lower it"
        )
    return rows, {"in": loaded.total, "rejected": len(loaded.rejects), "trained": len(rows)}


def sft_backward(actor: Actor, rows: Sequence[Demonstration], budget: int, mesh: Mesh = SINGLE) -> Metrics:
    """Gradients of one batch, whatever its cut into micro-batches and ranks."""
    tokens = float(sum(int(row.response_mask.sum()) for row in rows))
    total = 0.0
    parts = row_batches(rows, budget, share=actor.shares_prompts, ranks=mesh.world_size)
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    for part, counted in turns_of(parts, lengths, mesh):
        some = [rows[i] for i in part]
        log_probs, _ = actor.log_probs(some, ones(len(some)))
        mask = padded([row.response_mask for row in some], torch.bool)
        loss = aggregate(negative_log_likelihood(log_probs), mask, "token-mean", tokens=tokens)
        (loss if counted else 0 * loss).backward()  # type: ignore[no-untyped-call]
        total += loss.item() if counted else 0.0
    (total,) = mesh.sum([total])
    return {LOSS_KEY: total, "train/tokens": tokens, TOKENS_KEY: float(sum(lengths))}
