"""What each part of a reward says of each row, over the stage's pool. Not a verb.

The reward model is asked first, about rows that no cache knows; the parts that use it then read what it said,
here, while all other parts are worked out by the pool. A row meets the same rows in a batch however many
workers there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rein.config import paths
from rein.config.recipe import Recipe, RewardSpec
from rein.models.place import place_of
from rein.models.reward_model import load_reward_model
from rein.protocols import Tell
from rein.rewards import REWARDS, build, uses_model
from rein.scorer import DTYPE, Asked, CachedScorer, Told, row_key
from rein.stages.shards import Shards, content_of, cut
from rein.tables import lookup
from rein.types import TokenRow, Trajectory

TOGETHER = (
    256  # rows of a piece for the reward model, in every runtime: what shares a batch decides last digits
)
Scores = dict[str, list[float | None]]


class Rows(NamedTuple):
    """Rows that go together through the reward model, and the keys of those that it is asked about."""

    rows: Sequence[Trajectory]
    keys: Sequence[str]

    def __len__(self) -> int:  # in steps of progress
        return len(self.keys)


class Judge:
    """Worker: says what the named parts say of rows."""

    def __init__(self, specs: Sequence[RewardSpec], names: Sequence[str]) -> None:
        self.parts = [part for part in build(specs, scorer=Told({})).parts if part.name in names]

    def __call__(self, rows: Sequence[Trajectory], tell: Tell) -> pa.Table:
        said = {part.name: pa.array(list(part.reward(rows)), pa.float64()) for part in self.parts}
        tell(len(rows))
        return pa.table(said)


class Model:
    """Worker: asks the reward model, in the batches that the first part which uses it makes."""

    def __init__(self, recipe: Recipe, spec: RewardSpec) -> None:
        self.spec = spec
        self.model = load_reward_model(paths.reward_model(recipe), dtype=DTYPE, place=place_of(recipe.model))

    def __call__(self, piece: Rows, tell: Tell) -> pa.Table:
        asked = Asked(self.model, frozenset(piece.keys))
        build([self.spec], scorer=asked)(piece.rows)
        tell(len(piece))
        return pa.table({"row_key": list(asked.found), "score": list(asked.found.values())})


def scores_of(shards: Shards, rows: Sequence[Trajectory], scorer: CachedScorer | None) -> Scores:
    """What each part says of each row, by the part's name."""
    specs = shards.recipe.score.reward
    known: Mapping[str, float] = {}
    if scorer is not None:
        known = _model_scores(shards, cut(rows, TOGETHER), scorer)
    parts = build(specs, scorer=Told(known)).parts
    local = {part.name for part, spec in zip(parts, specs, strict=True) if uses_model([spec])}
    names = [part.name for part in parts if part.name not in local]
    by_part: Scores = {part.name: list(part.reward(rows)) for part in parts if part.name in local}
    if names:
        tables = shards.tables(
            "score",
            partial(Judge, specs, names),
            cut(rows, shards.recipe.ray.shard_rows),
            lambda: [[_said(spec) for spec in specs], names],
            lambda some: [content_of(row) for row in some],
        )
        by_part |= {name: [score for t in tables for score in t.column(name).to_pylist()] for name in names}
    return {part.name: by_part[part.name] for part in parts}


def _model_scores(
    shards: Shards, chunks: Sequence[Sequence[Trajectory]], scorer: CachedScorer
) -> dict[str, float]:
    """The model's score of every row, by row_key; the cache keeps what is new."""
    known: dict[str, float] = {}
    pieces, claimed = list[Rows](), set[str]()
    for rows in chunks:
        keys = [key for row in rows if (key := row_key(row)) not in claimed]
        known |= scorer.known(keys)
        if new := set(keys) - known.keys():
            claimed |= new
            pieces.append(Rows(rows, sorted(new)))
    first = next(spec for spec in shards.recipe.score.reward if uses_model([spec]))
    for _, table in shards.map(
        "reward model",
        partial(Model, shards.recipe, first),
        pieces,
        lambda: [_said(first), scorer.cache.key],
        lambda piece: [*(_ids(row) for row in piece.rows), *(key.encode() for key in piece.keys)],
    ):
        found = dict(zip(table.column("row_key").to_pylist(), table.column("score").to_pylist(), strict=True))
        scorer.learn(found)
        known |= found
    scorer.keep()
    return known


def _said(spec: RewardSpec) -> list[Any]:
    """What a reward's scores follow from beside the rows; of the user's function its file."""
    source = b""
    if spec.name not in REWARDS:
        file = inspect.getsourcefile(lookup(REWARDS, spec.name, "reward"))
        source = Path(file).read_bytes() if file else b""
    return [spec.name, spec.options, source.hex()]


def _ids(row: TokenRow) -> bytes:
    return row_key(row).encode()
