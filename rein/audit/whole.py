"""What training asks of an audit before it begins: the stored rows and the start policy in, a verdict out.

The same verdict is what `rein audit --model` prints. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rein.audit.model import facts
from rein.config.recipe import Recipe
from rein.data.audit.evidence import evidence_of
from rein.data.audit.verdict import Evidence, Verdict, judge
from rein.data.files import sources
from rein.data.loader import load_prompts, load_trajectories
from rein.data.parquet import columns_of
from rein.data.schemas import kind_of
from rein.data.split import prompt_key
from rein.data.tokenize import Encoder
from rein.models.actor import Actor
from rein.types import Trajectory


class Audited(NamedTuple):
    """What was found, and what follows."""

    evidence: Evidence
    model: Mapping[str, Any] | None
    verdict: Verdict


def audit(recipe: Recipe, files: Sequence[str], actor: Actor, encoder: Encoder) -> Audited:
    """Of trajectories or preferences; raises DataError for files the loader refuses."""
    kind = kind_of(columns_of(sources(files)[0]))
    rows: list[Trajectory] = []
    if kind in ("trajectories", "preferences"):
        rows = load_trajectories(files, encoder, recipe.data).rows
    prompts = evaluation_prompts(recipe, encoder)
    evidence = evidence_of(kind, rows, evaluation=prompts, evaluation_files=recipe.evaluate.files)
    model = facts(actor, rows, recipe.actor.ppo_max_token_len_per_gpu) if rows else None
    return Audited(evidence, model, judge(evidence, model))


def evaluation_prompts(recipe: Recipe, encoder: Encoder) -> set[str]:
    """Keys of what `evaluate.files` asks."""
    if not recipe.evaluate.files:
        return set()
    return {
        prompt_key(row.prompt_ids) for row in load_prompts(recipe.evaluate.files, encoder, recipe.data).rows
    }
