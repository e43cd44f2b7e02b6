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
from rein.data.batches import epoch_order, micro_batches, over_budget_note, turns_of
from rein.data.loader import load_pairs, rejects_kept, write_rejects
from rein.data.split import holdout
from rein.data.tokenize import Encoder
from rein.errors import ConfigError
from rein.functional.preferences import bradley_terry_loss, pair_statistics
from rein.model_files import weights_hash
from rein.models.load import load_tokenizer, stop_ids
from rein.models.reward_model import RewardModel, load_reward_model
from rein.protocols import Mesh
from rein.runtime.seeding import derive
from rein.runtime.single import SINGLE
from rein.stages.supervised import LOSS_KEY, TOKENS_KEY, Pupil, descend, forget, rows_mark
from rein.stages.team import model_options, team_of
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
    model = _open(recipe)["reward"]
    per_epoch = -(-len(rows) // reward.batch_size)
    total = reward.epochs * per_epoch
    team = team_of(recipe, {"reward": model}, _open)
    pupil = team.made(
        "pupil", Pupil, "reward", reward_backward, reward.optim, measure=measure,
        grad_clip=reward.grad_clip, total=total, budget=reward.ppo_max_token_len_per_gpu,
    )  # fmt: skip
    before = pupil.measure(held_out)

    def rows_of(step: int) -> list[PreferencePair]:
        order = epoch_order(len(rows), recipe.data_seed, step // per_epoch, recipe.data.shuffle)
        begin = (step % per_epoch) * reward.batch_size
        return [rows[i] for i in order[begin : begin + reward.batch_size]]

    metrics = descend(
        team,
        pupil,
        rows_of,
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
    after = pupil.measure(held_out)
    console.say(
        f"held-out pairs: {len(held_out)}, accuracy {after['accuracy']:.3f}, margin {after['margin']:.3f}"
    )
    team.files.save("reward", folder / "model")
    forget(folder)
    facts = {"rows": counts, "steps": total, "metrics": metrics, FACT: marks}
    return facts | {"held_out_before": before, "held_out": after}


def _open(recipe: Recipe) -> dict[str, RewardModel]:
    """The model that is trained."""
    seed, trunk = derive(recipe.seed, "reward"), paths.reward_trunk(recipe)
    return {"reward": load_reward_model(trunk, seed=seed, where="reward.path", **model_options(recipe))}


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


def _turns(pairs: Sequence[PreferencePair], budget: int, mesh: Mesh) -> list[tuple[list[int], bool]]:
    """This rank's micro-batches, which keep a pair together, and whether each counts."""
    lengths = _lengths(pairs)
    return turns_of(micro_batches(lengths, budget), lengths, mesh)


def _lengths(pairs: Sequence[PreferencePair]) -> list[int]:
    return [2 * len(p.prompt_ids) + len(p.chosen_ids) + len(p.rejected_ids) for p in pairs]


def reward_backward(
    model: RewardModel, pairs: Sequence[PreferencePair], budget: int, mesh: Mesh = SINGLE
) -> Metrics:
    """Gradients of the mean Bradley-Terry loss over the pairs."""
    total = right = 0.0
    for part, counted in _turns(pairs, budget, mesh):
        some = [pairs[i] for i in part]
        scores = model.scores(_sides(some)).view(-1, 2)
        margin = torch.tensor([pair.margin for pair in some], dtype=scores.dtype)
        loss = bradley_terry_loss(scores[:, 0], scores[:, 1], margin).sum() / len(pairs)
        (loss if counted else 0 * loss).backward()  # type: ignore[no-untyped-call]
        if counted:
            total += loss.item()
            right += float((scores[:, 0] > scores[:, 1]).sum())
    total, right = mesh.sum([total, right])
    tokens = float(sum(_lengths(pairs)))
    return {LOSS_KEY: total, "train/accuracy": right / len(pairs), TOKENS_KEY: tokens}


@torch.no_grad()
def measure(model: RewardModel, pairs: Sequence[PreferencePair], budget: int, mesh: Mesh = SINGLE) -> Metrics:
    """Accuracy, ties and mean margin on held-out pairs."""
    if not pairs:
        return {"accuracy": float("nan"), "ties": float("nan"), "margin": float("nan")}
    scores = torch.zeros(len(pairs), 2)
    for part, counted in _turns(pairs, budget, mesh):
        found = model.scores(_sides([pairs[i] for i in part])).view(-1, 2).float()
        if counted:
            scores[torch.tensor(part)] = found
    mesh.add(scores)
    return pair_statistics(scores[:, 0], scores[:, 1])
