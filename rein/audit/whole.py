"""The audit with a model: stored rows and a policy in, a verdict out. Writes nothing.

`rein audit --model` prints the verdict, training under `algorithm.method: auto` obeys it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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

Says = Callable[[Sequence[Trajectory]], Mapping[str, Any]]  # of rows -> audit.model.facts


class Audited(NamedTuple):
    """What was found, and what follows."""

    evidence: Evidence
    model: Mapping[str, Any] | None
    verdict: Verdict


def audit(recipe: Recipe, files: Sequence[str | Path], actor: Actor, encoder: Encoder) -> Audited:
    """Of trajectories or preferences; raises DataError for files the loader refuses."""
    return audit_by(recipe, files, encoder, lambda rows: facts(actor, rows, recipe.actor.token_budget))


def audit_by(recipe: Recipe, files: Sequence[str | Path], encoder: Encoder, says: Says) -> Audited:
    """The same, with what a model says of the rows however it is found."""
    kind = kind_of(columns_of(sources(files)[0]))
    rows: list[Trajectory] = []
    if kind in ("trajectories", "preferences"):
        rows = load_trajectories(files, encoder, recipe.data).rows
    others = evaluation_files(recipe)
    asked = {prompt_key(prompt.prompt_ids) for prompt in _prompts(recipe, others, encoder)}
    evidence = evidence_of(kind, rows, evaluation=asked, evaluation_files=others)
    model = says(rows) if rows else None
    return Audited(evidence, model, judge(evidence, model, recomputed=recipe.data.behavior == "recomputed"))


def evaluation_files(recipe: Recipe) -> list[str]:
    """What training must not have seen: the prompts of the evaluation and of the validation."""
    return [*recipe.evaluate.files, *recipe.data.val_files]


def _prompts(recipe: Recipe, files: Sequence[str], encoder: Encoder) -> Sequence[Any]:
    return load_prompts(files, encoder, recipe.data).rows if files else ()
