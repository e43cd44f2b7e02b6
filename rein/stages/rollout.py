"""Stored prompts -> trajectories: token ids, log-probs at the sampling temperature, finish reason, version.

Writes rollout/trajectories.parquet and manifest.json. A sample of the rows is scored again by the training
forward and the largest difference is written into the file's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.loader import load_prompts, rejects_kept, write_rejects
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.data.token_marks import noted
from rein.data.tokenize import Encoder
from rein.experience import in_micro_batches
from rein.models.actor import load_actor
from rein.models.place import loading
from rein.protocols import Tell
from rein.runtime.seeding import derive
from rein.stages.engines import engine_of
from rein.stages.leave_out import without_prompts
from rein.stages.shards import Shards, cut, key_of
from rein.stages.tokens import FACT, compared, encoder_in
from rein.tracking.console import Console
from rein.types import Completion, Prompt, Trajectory

CHECKED_ROWS = 64


class Prompts(NamedTuple):
    """Prompts that one worker answers, and where they stand among all."""

    prompts: Sequence[Prompt]
    first: int
    checked: Sequence[int]  # of their answers, by place: scored again by the training forward

    def __len__(self) -> int:  # in steps of progress
        return len(self.prompts)


class Writer:
    """Worker: answers prompts; a row of its table is an answer, those of a prompt beside each other."""

    def __init__(self, recipe: Recipe, policy: str) -> None:
        self.recipe = recipe
        self.actor = load_actor(policy, **loading(recipe.model))
        self.engine = engine_of(recipe, self.actor)

    def __call__(self, piece: Prompts, tell: Tell) -> pa.Table:
        rollout = self.recipe.rollout
        answers = self.engine.generate(
            piece.prompts,
            n=rollout.n,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_new_tokens=longest(self.recipe),
            seed=seed_of(self.recipe),
            advance=tell,
            places=range(piece.first, piece.first + len(piece)),
        )
        pairs = [(p, found) for p, some in zip(piece.prompts, answers, strict=True) for found in some]
        checked = [_trajectory(self.recipe, self.actor.path, *pairs[i]) for i in piece.checked]
        differences: list[float | None] = [None] * len(pairs)
        for i, apart in zip(piece.checked, self._differences(checked), strict=True):
            differences[i] = apart
        return pa.table(
            {
                "response_ids": pa.array([found.response_ids for _, found in pairs], pa.list_(pa.int64())),
                "log_probs": pa.array([found.log_probs for _, found in pairs], pa.list_(pa.float32())),
                "finish_reason": pa.array([found.finish_reason for _, found in pairs], pa.string()),
                "difference": pa.array(differences, pa.float64()),
            }
        )

    def _differences(self, rows: list[Trajectory]) -> list[float]:
        """Largest |decoded - training forward| log-prob of each row; 0 of greedy rows."""
        if not rows or rows[0].behavior_log_probs is None:
            return [0.0] * len(rows)
        actor, budget = self.actor, self.recipe.actor.token_budget
        found = in_micro_batches(
            rows, budget, lambda part, temp: actor.log_probs(part, temp)[0], share=actor.shares_prompts
        )
        return [
            float(abs(found[i, : len(row.response_ids)].numpy() - row.behavior_log_probs).max())
            for i, row in enumerate(rows)
        ]


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Answer every prompt of rollout.files n times with rollout.path."""
    rollout, folder = recipe.rollout, paths.stage_dir(recipe, "rollout")
    policy = paths.rollout_policy(recipe)
    encoder = encoder_in(policy, recipe)
    marks = compared(encoder, console, policy)
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_prompts(paths.rollout_files(recipe), encoder, recipe.data)
    for note in loaded.notes:
        console.say(f"data: {note}")
    counts = {"in": loaded.total, "rejected": len(loaded.rejects)}
    known = without_prompts(loaded.rows, recipe, encoder)
    if left_out := len(loaded.rows) - len(known):
        counts["left_out"] = left_out
    begin = rollout.skip_prompts % max(len(known), 1)
    prompts = [*known[begin:], *known[:begin]][: rollout.max_prompts]
    if beyond := len(known) - len(prompts):
        counts["beyond_max_prompts"] = beyond
    said = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
    console.say(f"prompts: {said}, {len(prompts)} answered {rollout.n} times")
    shards = Shards(recipe, console, "rollout")
    rows, difference = _answered(shards, recipe, policy, encoder, prompts)
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    write_rows(
        folder / "trajectories.parquet",
        [trajectory_row(row) for row in rows],
        TRAJECTORIES,
        {"rein.log_prob_diff_max": f"{difference:.3g}", "rein.behavior_policy": policy} | noted(encoder),
    )
    shards.done()
    stopped = sum(row.finish_reason == "stop" for row in rows)
    console.say(
        f"trajectories: {len(rows)}, {stopped} finished, log-probs reproduced within {difference:.2g}"
    )
    return {
        "rows": counts | {"prompts": len(prompts), "trajectories": len(rows)},
        "finished": stopped,
        "log_prob_diff_max": difference,
        FACT: marks,
        **shards.facts,
    }


def _answered(
    shards: Shards, recipe: Recipe, policy: str, encoder: Encoder, prompts: Sequence[Prompt]
) -> tuple[list[Trajectory], float]:
    """All answers as rows, and the largest difference of their log-probs found."""
    tables = shards.tables(
        "rollout",
        partial(Writer, recipe, policy),
        pieces_of(prompts, recipe),
        lambda: [
            key_of(recipe, policy, "rollout.path"),
            recipe.rollout.model_dump(exclude={"files", "path", "max_prompts", "batch_size"}),
            [longest(recipe), seed_of(recipe), recipe.actor.token_budget],
        ],
        lambda piece: [
            str([piece.first, *piece.checked]).encode(),
            *(prompt.prompt_ids.tobytes() for prompt in piece.prompts),
        ],
    )
    answers = [answer for table in tables for answer in table.to_pylist()]
    rows = []
    for i, answer in enumerate(answers):
        ids = np.array(answer["response_ids"], dtype=np.int64)
        log_probs = np.array(answer["log_probs"], dtype=np.float32)
        completion = Completion(ids, log_probs, answer["finish_reason"])
        row = _trajectory(recipe, policy, prompts[i // recipe.rollout.n], completion)
        rows.append(replace(row, response=encoder.decode_response(ids)))
    return rows, max((answer["difference"] or 0.0 for answer in answers), default=0.0)


def pieces_of(prompts: Sequence[Prompt], recipe: Recipe) -> list[Prompts]:
    """All prompts in one process, else shards of them."""
    n, rows = recipe.rollout.n, len(prompts) * recipe.rollout.n
    size = max(recipe.ray.shard_rows // n, 1) if recipe.runtime == "ray" else max(len(prompts), 1)
    every = max(rows // CHECKED_ROWS, 1)
    return [
        Prompts(some, i * size, [row for row in range(len(some) * n) if (i * size * n + row) % every == 0])
        for i, some in enumerate(cut(prompts, size))
    ]


def longest(recipe: Recipe) -> int:
    return recipe.rollout.max_new_tokens or recipe.data.max_response_length


def seed_of(recipe: Recipe) -> int:
    return derive(recipe.seed, "rollout", recipe.rollout.policy_version)


def _trajectory(recipe: Recipe, policy: str, prompt: Prompt, completion: Completion) -> Trajectory:
    rollout = recipe.rollout
    greedy = rollout.temperature == 0
    return Trajectory(
        where=prompt.where,
        messages=prompt.messages,
        prompt_ids=prompt.prompt_ids,
        response_ids=completion.response_ids,
        response_mask=completion.response_ids >= 0,
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
