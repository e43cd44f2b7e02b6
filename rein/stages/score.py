"""Trajectories -> scores: by rules, a reward model, the user's function, or a weighted mix.

Writes score/trajectories.parquet, which is the file that was read with a `score` column: ids, log-probs and
the user's own columns stay. Rows that cannot be scored go to rejects.jsonl, so rows in = rows scored +
rejects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data import schemas, token_marks
from rein.data.files import sources
from rein.data.loader import load_trajectories, rejects_kept, write_rejects
from rein.data.parquet import Row, columns_of, metadata_of, read_rows, write_rows
from rein.data.rejects import Reject, judge
from rein.data.tokenize import Encoder
from rein.models.load import load_tokenizer, stop_ids
from rein.rewards import build, part_metrics, uses_model
from rein.scorer import open_scorer
from rein.stages import log_prob_notes
from rein.stages.score_parts import Scores, scores_of
from rein.stages.shards import Shards
from rein.stages.tokens import FACT, compared
from rein.tracking.console import Console
from rein.types import Trajectory

# Columns that a Trajectory does not hold as the file had them, and those of pairs, which two rows replace.
KEPT_AS_STORED = frozenset({schemas.ABILITY, schemas.BASELINE_SCORE, schemas.REWARD_MODEL, schemas.TOOLS})
REPLACED = frozenset(
    {schemas.CHOSEN, schemas.REJECTED, schemas.MARGIN, schemas.MESSAGES, schemas.GROUND_TRUTH}
)
KEPT_NOTES = (*log_prob_notes.KEYS, "rein.behavior_policy", token_marks.KEY)  # rollout notes them


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Score every trajectory of score.files with score.reward."""
    files, folder = paths.score_files(recipe), paths.stage_dir(recipe, "score")
    needed = uses_model(recipe.score.reward)
    scorer = open_scorer(recipe) if needed else None
    mix = build(recipe.score.reward, scorer=scorer)
    for note in mix.notes:
        console.say(note)
    encoder = _encoder(recipe)
    marks = compared(encoder, console, paths.start_policy(recipe, "score"), files)
    with rejects_kept(folder / "rejects.jsonl"):
        loaded = load_trajectories(files, encoder, recipe.data, scored=False)
    for note in loaded.notes:
        console.say(f"data: {note}")
    shards = Shards(recipe, console, "score")
    by_part = scores_of(shards, loaded.rows, scorer)
    rows: list[Trajectory] = []
    rejects = list(loaded.rejects)
    for index, (row, score) in enumerate(zip(loaded.rows, mix.total(by_part), strict=True)):
        if score is None:
            blind = [name for name, scores in by_part.items() if scores[index] is None]
            rejects.append(Reject(row.where, f"no ground truth that {', '.join(blind)} can use", "no score"))
        else:
            rows.append(row.with_score(score))
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", rejects)
    data = recipe.data
    judge(
        ", ".join(files),
        rejects,
        loaded.total,
        max_bad_fraction=data.max_bad_fraction,
        truncation=data.truncation,
    )
    write_scored(files, folder / "trajectories.parquet", rows, token_marks.noted(encoder))
    shards.done()
    facts = _facts(rows, by_part) | shards.facts
    if scorer is not None:
        facts["cache"] = scorer.cache.counts
        console.say(
            f"reward model: {scorer.cache.hits} scores from the cache, {scorer.cache.misses} computed"
        )
    console.say(
        f"scores: {len(rows)} of {loaded.total} rows, {len(rejects)} rejected; "
        f"mean {facts['score/mean']:.4g}, from {facts['score/min']:.4g} to {facts['score/max']:.4g}"
    )
    return {"rows": {"in": loaded.total, "rejected": len(rejects), "scored": len(rows)}, FACT: marks, **facts}


def _encoder(recipe: Recipe) -> Encoder:
    start = paths.start_policy(recipe, "score")
    tokenizer = load_tokenizer(start, trust_remote_code=recipe.model.trust_remote_code)
    ends = set(stop_ids(start, tokenizer))
    return Encoder(tokenizer, apply_chat_template=recipe.data.apply_chat_template, stop_ids=ends)


def _facts(rows: Sequence[Trajectory], by_part: Scores) -> dict[str, Any]:
    scores = np.array([row.score for row in rows], dtype=np.float64)
    facts = {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
    return {f"score/{name}": float(value) for name, value in facts.items()} | part_metrics(by_part)


def write_scored(
    files: Sequence[str], path: Path, rows: Sequence[Trajectory], marks: Mapping[str, str]
) -> None:
    """The rows with every column they came with. Columns without a name in the schema become free ones."""
    found = sources(files)
    columns = dict.fromkeys(name for source in found for name in columns_of(source))
    own = [name for name in columns if name not in {*schemas.TRAJECTORIES.names, *REPLACED}]
    kept = [*own, *(name for name in columns if name in KEPT_AS_STORED)]
    stored: Mapping[str, Row] = {}
    if kept:
        wanted = {row.where.removesuffix(" chosen").removesuffix(" rejected") for row in rows}
        stored = {where: row for where, row in read_rows(files, kept, bad=_passed_over) if where in wanted}
    free = [pa.field(name, pa.string(), metadata={schemas.FREE_KEY: b"1"}) for name in own]
    schema = pa.schema([*schemas.TRAJECTORIES, *free], metadata=schemas.TRAJECTORIES.metadata)
    lines = []
    for row in rows:
        where = row.where.removesuffix(" chosen").removesuffix(" rejected")
        as_stored = {name: value for name, value in stored.get(where, {}).items() if value is not None}
        lines.append(schemas.trajectory_row(row) | as_stored)
    notes = {
        name: note for source in found for name, note in metadata_of(source).items() if name in KEPT_NOTES
    }
    write_rows(path, lines, schema, dict(marks) | notes)


def _passed_over(where: str, reason: str) -> None:
    """The loader has rejected this row already."""
