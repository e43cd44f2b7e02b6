"""Bradley-Terry reward model from preference pairs: pairs in, a sequence-classification folder out.

Pairs of held-out prompts measure accuracy and margin before and after. Writes reward/model,
reward/metrics.jsonl and manifest.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.batches import epoch_order, micro_batches, over_budget_note
from rein.data.loader import load_pairs, rejects_kept, write_rejects
from rein.data.split import holdout
from rein.data.tokenize import Encoder
from rein.errors import ConfigError
from rein.functional.preferences import bradley_terry_loss, pair_statistics
from rein.models.load import load_tokenizer, stop_ids, weights_hash
from rein.models.reward_model import RewardModel, load_reward_model
from rein.runtime.optimizer import Optimizer
from rein.runtime.seeding import derive
from rein.stages.supervised import LOSS_KEY, descend, forget, rows_mark
from rein.stages.tokens import FACT, compared
from rein.tracking.console import Console
from rein.types import Ids, Metrics, PreferencePair


@dataclass(frozen=True, slots=True)
class Side:
    """One of a pair's two responses, as a model reads it."""

    prompt_ids: Ids
    response_ids: Ids


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train on reward.files from reward.path, else from what train would start from."""
    reward, folder = recipe.reward, paths.stage_dir(recipe, "reward")
    trunk = paths.reward_trunk(recipe)
    tokenizer = load_tokenizer(trunk, where="reward.path")
    encoder = Encoder(
        tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=set(stop_ids(trunk, tokenizer)),
        vocab_size=len(tokenizer),
    )
    marks = compared(encoder, console, trunk, paths.reward_files(recipe))
    rows, held_out, counts = _load_rows(recipe, console, encoder)
    options = recipe.model.model_dump(exclude={"path", "logits_chunk", "use_torch_compile"})
    model = load_reward_model(trunk, seed=derive(recipe.seed, "reward"), where="reward.path", **options)
    per_epoch = -(-len(rows) // reward.batch_size)
    total = reward.epochs * per_epoch
    optimizer = Optimizer(model.model, reward.optim, grad_clip=reward.grad_clip, total_steps=total)
    budget = reward.ppo_max_token_len_per_gpu
    before = measure(model, held_out, budget)

    def backward(step: int) -> Metrics:
        order = epoch_order(len(rows), recipe.data_seed, step // per_epoch, recipe.data.shuffle)
        begin = (step % per_epoch) * reward.batch_size
        return reward_backward(model, [rows[i] for i in order[begin : begin + reward.batch_size]], budget)

    metrics = descend(
        backward,
        optimizer,
        recipe=recipe,
        console=console,
        folder=folder,
        what="reward",
        total=total,
        save_freq=reward.save_freq,
        settings={
            "model": recipe.model.model_dump(exclude={"path"}) | {"start": weights_hash(Path(model.path))},
            "reward": reward.model_dump(exclude={"save_freq"}),
            "seed": [recipe.seed, recipe.data_seed],
            "rows": rows_mark([row.prompt_ids.tobytes() + row.chosen_ids.tobytes() for row in rows]),
        },
    )
    after = measure(model, held_out, budget)
    console.say(
        f"held-out pairs: {len(held_out)}, accuracy {after['accuracy']:.3f}, margin {after['margin']:.3f}"
    )
    model.save(folder / "model")
    forget(folder)
    facts = {"rows": counts, "steps": total, "metrics": metrics, FACT: marks}
    return facts | {"held_out_before": before, "held_out": after}


def _load_rows(
    recipe: Recipe, console: Console, encoder: Encoder
) -> tuple[list[PreferencePair], list[PreferencePair], dict[str, int]]:
    """The pairs to train on, those held out, and how many went where."""
    folder, size = paths.stage_dir(recipe, "reward"), recipe.reward.batch_size
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_pairs(paths.reward_files(recipe), encoder, recipe.data)
    for note in loaded.notes:
        console.say(f"data: {note}")
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    rows, held_out = holdout(loaded.rows, recipe.data.holdout_fraction, derive(recipe.data_seed, "holdout"))
    counts = {"in": loaded.total, "rejected": len(loaded.rejects)}
    counts |= {"held_out": len(held_out), "trained": len(rows)}
    key, budget = "reward.ppo_max_token_len_per_gpu", recipe.reward.ppo_max_token_len_per_gpu
    for note in over_budget_note([row.where for row in rows], _lengths(rows), budget, key):
        console.say(f"warning: {note}")
    console.say("rows: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    if size > len(rows):
        raise ConfigError(
            f"reward.batch_size {size} is larger than the {len(rows)} pairs to train on; lower it"
        )
    return rows, held_out, counts


def _sides(pairs: Sequence[PreferencePair]) -> list[Side]:
    """Chosen and rejected of each pair beside each other."""
    both = [(Side(p.prompt_ids, p.chosen_ids), Side(p.prompt_ids, p.rejected_ids)) for p in pairs]
    return [side for pair in both for side in pair]


def _pair_batches(pairs: Sequence[PreferencePair], budget: int) -> list[list[int]]:
    """Micro-batches that keep a pair together."""
    return micro_batches(_lengths(pairs), budget)


def _lengths(pairs: Sequence[PreferencePair]) -> list[int]:
    return [2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs]


def reward_backward(model: RewardModel, pairs: Sequence[PreferencePair], budget: int) -> Metrics:
    """Gradients of the mean Bradley-Terry loss over the pairs."""
    total = right = 0.0
    for part in _pair_batches(pairs, budget):
        some = [pairs[i] for i in part]
        scores = model.scores(_sides(some)).view(-1, 2)
        margin = torch.tensor([pair.margin for pair in some], dtype=scores.dtype)
        loss = bradley_terry_loss(scores[:, 0], scores[:, 1], margin).sum() / len(pairs)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
        right += float((scores[:, 0] > scores[:, 1]).sum())
    return {LOSS_KEY: total, "train/accuracy": right / len(pairs)}


@torch.no_grad()
def measure(model: RewardModel, pairs: Sequence[PreferencePair], budget: int) -> Metrics:
    """Accuracy, ties and mean margin on held-out pairs."""
    if not pairs:
        return {"accuracy": float("nan"), "ties": float("nan"), "margin": float("nan")}
    scores = torch.zeros(len(pairs), 2)
    for part in _pair_batches(pairs, budget):
        scores[torch.tensor(part)] = model.scores(_sides([pairs[i] for i in part])).view(-1, 2).float()
    return pair_statistics(scores[:, 0], scores[:, 1])
