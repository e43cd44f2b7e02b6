"""Stored prompts -> trajectories: token ids, log-probs at the sampling temperature, finish reason, version.

Writes rollout/trajectories.parquet and manifest.json. A sample of the rows is scored again by the training
forward and the largest difference is written into the file's metadata.
"""

from __future__ import annotations

from typing import Any

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.loader import load_prompts, rejects_kept, write_rejects
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.data.token_marks import noted
from rein.data.tokenize import Encoder
from rein.engines.hf import HfEngine
from rein.experience import in_micro_batches
from rein.models.actor import Actor, load_actor
from rein.models.place import loading
from rein.runtime.seeding import derive
from rein.stages.tokens import FACT, compared, encoder_of
from rein.tracking.console import Console
from rein.types import Completion, Prompt, Trajectory

CHECKED_ROWS = 64


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Answer every prompt of rollout.files n times with rollout.path."""
    rollout, folder = recipe.rollout, paths.stage_dir(recipe, "rollout")
    policy = paths.rollout_policy(recipe)
    actor = load_actor(policy, **loading(recipe.model))
    encoder = encoder_of(actor, recipe)
    marks = compared(encoder, console, policy)
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_prompts(paths.rollout_files(recipe), encoder, recipe.data)
    for note in loaded.notes:
        console.say(f"data: {note}")
    prompts = loaded.rows[: rollout.max_prompts]
    counts = {"in": loaded.total, "rejected": len(loaded.rejects)}
    if beyond := len(loaded.rows) - len(prompts):
        counts["beyond_max_prompts"] = beyond
    said = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
    console.say(f"prompts: {said}, {len(prompts)} answered {rollout.n} times")
    engine = HfEngine(
        actor.model, actor.tokenizer, actor.stop_ids, batch_size=rollout.batch_size, stop_texts=rollout.stop
    )
    with console.progress(len(prompts), "rollout") as advance:
        answers = engine.generate(
            prompts,
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_new_tokens or recipe.data.max_response_length,
            seed=derive(recipe.seed, "rollout", rollout.policy_version),
            advance=advance,
        )
    rows = [
        _trajectory(recipe, policy, encoder, prompt, completion)
        for prompt, completions in zip(prompts, answers, strict=True)
        for completion in completions
    ]
    difference = log_prob_difference(actor, rows, recipe.actor.token_budget)
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    write_rows(
        folder / "trajectories.parquet",
        [trajectory_row(row) for row in rows],
        TRAJECTORIES,
        {"rein.log_prob_diff_max": f"{difference:.3g}", "rein.behavior_policy": policy} | noted(encoder),
    )
    stopped = sum(row.finish_reason == "stop" for row in rows)
    console.say(
        f"trajectories: {len(rows)}, {stopped} finished, log-probs reproduced within {difference:.2g}"
    )
    return {
        "rows": counts | {"prompts": len(prompts), "trajectories": len(rows)},
        "finished": stopped,
        "log_prob_diff_max": difference,
        FACT: marks,
    }


def _trajectory(
    recipe: Recipe, policy: str, encoder: Encoder, prompt: Prompt, completion: Completion
) -> Trajectory:
    rollout = recipe.rollout
    greedy = rollout.temperature == 0
    return Trajectory(
        where=prompt.where,
        messages=prompt.messages,
        prompt_ids=prompt.prompt_ids,
        response_ids=completion.response_ids,
        response_mask=completion.response_ids >= 0,
        response=encoder.decode_response(completion.response_ids),
        # A greedy policy is certain of its answer: its stored log-probs would not be a behavior to divide by.
        behavior_log_probs=None if greedy else completion.log_probs,
        finish_reason=completion.finish_reason,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        behavior_policy=policy,
        policy_version=rollout.policy_version,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )


def log_prob_difference(actor: Actor, rows: list[Trajectory], budget: int) -> float:
    """Largest |decoded - training forward| log-prob over a sample of rows; 0 for greedy rows."""
    sample = [row for row in rows[:: max(len(rows) // CHECKED_ROWS, 1)] if row.behavior_log_probs is not None]
    if not sample:
        return 0.0
    found = in_micro_batches(
        sample, budget, lambda part, temp: actor.log_probs(part, temp)[0], share=actor.shares_prompts
    )
    return max(
        float(abs(found[i, : len(row.response_ids)].numpy() - row.behavior_log_probs).max())
        for i, row in enumerate(sample)
        if row.behavior_log_probs is not None
    )
