"""Stored prompts -> trajectories: token ids, log-probs at the sampling temperature, finish reason, version.

Writes rollout/trajectories.parquet and manifest.json. A sample of the rows is scored again by the training
forward; what the engine's log-probs are, and the largest difference, is written into the file's metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rein import manifest
from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.loader import load_prompts, rejects_kept, write_rejects
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.data.token_marks import noted
from rein.data.tokenize import Encoder
from rein.models.actor import load_actor
from rein.models.place import loading
from rein.protocols import Tell
from rein.runtime.seeding import derive
from rein.stages.engines import engine_of, keeps_answers
from rein.stages.leave_out import without_prompts
from rein.stages.log_prob_notes import APART, STORED, Compared, Rescorer, apart, compared
from rein.stages.shards import Shards, content_of, cut, key_of
from rein.stages.tokens import FACT, encoder_in
from rein.stages.tokens import compared as marks_of
from rein.tracking.console import Console
from rein.types import Completion, Prompt, Trajectory

CHECKED_ROWS = 64
# Of rollout's keys, those that no answer follows from.
NOT_SAID: dict[str, Any] = {
    **dict.fromkeys(("files", "path", "max_prompts", "skip_prompts", "batch_size"), True),
    **manifest.OF_ASKING,
}


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
        pairs = [(p, one) for p, some in zip(piece.prompts, answers, strict=True) for one in some]
        checked = [_trajectory(self.recipe, self.actor.path, *pairs[i]) for i in piece.checked]
        gaps: list[dict[str, float] | None] = [None] * len(pairs)
        found = apart(self.actor, checked, self.recipe.actor.token_budget)
        for i, gap in zip(piece.checked, found, strict=True):
            gaps[i] = gap
        return pa.table(
            {
                "response_ids": pa.array([one.response_ids for _, one in pairs], pa.list_(pa.int64())),
                "log_probs": pa.array([one.log_probs for _, one in pairs], pa.list_(pa.float32())),
                "finish_reason": pa.array([one.finish_reason for _, one in pairs], pa.string()),
                "apart": pa.array(gaps, APART),
            }
        )


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Answer every prompt of rollout.files n times with rollout.path."""
    rollout, folder = recipe.rollout, paths.stage_dir(recipe, "rollout")
    policy = paths.rollout_policy(recipe)
    encoder = encoder_in(policy, recipe)
    marks = marks_of(encoder, console, policy)
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
    shards = Shards(recipe, console, "rollout", kept=keeps_answers(recipe))
    rows, sample = _answered(shards, recipe, policy, encoder, prompts)
    if sample is not None:
        if said := sample.said(policy):
            console.say(said)
        rows = _with_known(shards, recipe, policy, rows, sample)
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", loaded.rejects)
    notes = {"rein.log_prob_diff_max": "0"} if sample is None else sample.notes
    if sample is None or sample.known:
        notes["rein.behavior_policy"] = policy
    write_rows(
        folder / "trajectories.parquet",
        [trajectory_row(row) for row in rows],
        TRAJECTORIES,
        notes | noted(encoder),
    )
    shards.done()
    return _ended(rows, sample, console) | {
        "rows": counts | {"prompts": len(prompts), "trajectories": len(rows)},
        FACT: marks,
        **shards.facts,
    }


def _ended(rows: Sequence[Trajectory], sample: Compared | None, console: Console) -> dict[str, Any]:
    """For the manifest; said too."""
    stopped = sum(row.finish_reason == "stop" for row in rows)
    largest = 0.0 if sample is None else sample.largest
    said = f"trajectories: {len(rows)}, {stopped} finished"
    known = sample is None or sample.known
    console.say(f"{said}, log-probs reproduced within {largest:.2g}" if known else said)
    facts = {"finished": stopped, "log_prob_diff_max": largest}
    return facts if sample is None else facts | {"log_probs_kind": sample.kind}


def _answered(
    shards: Shards, recipe: Recipe, policy: str, encoder: Encoder, prompts: Sequence[Prompt]
) -> tuple[list[Trajectory], Compared | None]:
    """All answers as rows, and what the engine's log-probs are; None of greedy rows, which keep none."""
    file = manifest.function_file(recipe.rollout.engine)
    engine = None if file is None else manifest.hash_input(file)
    tables = shards.tables(
        "rollout",
        partial(Writer, recipe, policy),
        pieces_of(prompts, recipe),
        lambda: [
            key_of(recipe, policy, "rollout.path"),
            recipe.rollout.model_dump(exclude=NOT_SAID),
            [longest(recipe), seed_of(recipe), recipe.actor.token_budget, engine],
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
    checked = [answer for answer in answers if answer["apart"] is not None]
    if recipe.rollout.temperature == 0 or not checked:
        return rows, None
    tokens = sum(len(answer["response_ids"]) for answer in checked)
    return rows, compared([answer["apart"] for answer in checked], tokens)


def _with_known(
    shards: Shards, recipe: Recipe, policy: str, rows: list[Trajectory], sample: Compared
) -> list[Trajectory]:
    """The rows with the behavior log-probs that are known to be theirs."""
    if STORED[sample.kind] == "as given":
        return rows
    if not sample.known:
        return [replace(row, behavior_log_probs=None, behavior_policy="") for row in rows]
    tables = shards.tables(
        "log-probs",
        partial(Rescorer, recipe, policy),
        cut(rows, rows_together(recipe)),
        lambda: [key_of(recipe, policy, "rollout.path"), recipe.actor.token_budget],
        lambda piece: [content_of(row) for row in piece],
    )
    own = [np.array(log_probs) for table in tables for log_probs in table["log_probs"].to_pylist()]
    return [
        replace(row, behavior_log_probs=found.astype(np.float32))
        for row, found in zip(rows, own, strict=True)
    ]


def rows_together(recipe: Recipe) -> int:
    """How many rows a piece of work has where it is kept."""
    return recipe.ray.shard_rows if recipe.runtime == "ray" else recipe.rollout.batch_size


def pieces_of(prompts: Sequence[Prompt], recipe: Recipe) -> list[Prompts]:
    """Shards of the prompts, where they are kept; else all."""
    n, rows = recipe.rollout.n, len(prompts) * recipe.rollout.n
    in_parts = recipe.runtime == "ray" or keeps_answers(recipe)
    size = max(rows_together(recipe) // n if in_parts else len(prompts), 1)
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
