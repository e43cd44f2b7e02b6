"""What the model of model.path says of stored rows, over the pool that the recipe asks for.

Part of commands/audit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rein.audit.model import CUTS, TEMPERATURES, Read, facts_of, read_of, sample_of
from rein.audit.whole import Audited, audit_by
from rein.config.recipe import Recipe
from rein.models.actor import load_actor
from rein.models.place import loading
from rein.protocols import Tell
from rein.stages.shards import Shards, content_of, cut, key_of
from rein.stages.tokens import encoder_in
from rein.types import Trajectory

ROWS = 64  # of a shard: the sample has 512 at most
WIDE = {"beyond": len(CUTS), "at": len(TEMPERATURES)}  # columns of Read with so many numbers a token


class Reader:
    """Worker: what the model says of rows, a token a row of its table."""

    def __init__(self, recipe: Recipe, path: str) -> None:
        self.budget = recipe.actor.token_budget
        self.actor = load_actor(path, **loading(recipe.model))

    def __call__(self, rows: Sequence[Trajectory], tell: Tell) -> pa.Table:
        read = read_of(self.actor, rows, self.budget)._asdict()
        tell(len(rows))
        return pa.table({name: _column(values) for name, values in read.items()})


def audited(recipe: Recipe, files: Sequence[str | Path], path: str, shards: Shards) -> Audited:
    """The audit with the model in this folder; raises DataError for files the loader refuses."""

    def says(rows: Sequence[Trajectory]) -> dict[str, Any]:
        sample = sample_of(rows)
        pieces = cut(sample, ROWS if recipe.runtime == "ray" else len(sample))
        tables = shards.tables(
            "model",
            partial(Reader, recipe, path),
            pieces,
            lambda: [
                key_of(recipe, path, "model.path"),
                recipe.actor.token_budget,
            ],
            lambda some: [content_of(row) for row in some],
        )
        return facts_of(path, sample, _joined(pieces, tables))

    encoder = encoder_in(path, recipe)
    return audit_by(recipe, files, encoder, says)


def _column(values: Tensor) -> pa.Array:
    """[N], or [C, N] as lists of C numbers."""
    flat = values.t().contiguous().reshape(-1).numpy()
    return pa.array(flat) if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, len(values))


def _joined(pieces: Sequence[Sequence[Trajectory]], tables: Sequence[pa.Table]) -> Read:
    """The tables as one, rows counted over all pieces."""
    first = np.cumsum([0, *map(len, pieces)])
    whole = pa.concat_tables(tables)
    columns = {name: whole.column(name).combine_chunks() for name in whole.column_names}
    found = {
        name: torch.tensor(
            column.flatten().to_numpy().reshape(-1, WIDE[name]).T if name in WIDE else column.to_numpy()
        )
        for name, column in columns.items()
    }
    found["row"] += torch.repeat_interleave(
        torch.tensor(first[:-1]), torch.tensor([len(table) for table in tables])
    )
    return Read(**found)
