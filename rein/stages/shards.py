"""A stage's rows cut into pieces, done by the pool that the recipe asks for. Not a verb.

Where pieces are `kept`, as always with runtime: ray, each that is done lies in `<out>/<stage>/shards` under a
key of its content, until the stage's own files are written: the same command after a kill, or after what the
stage needs has failed, does what is missing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa

from rein import __version__
from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.shards import ShardFolder, content_key
from rein.errors import EngineError, RankLost
from rein.protocols import Piece, Pool, Tell
from rein.runtime.pool import OneProcess
from rein.stages.process import prepare_process
from rein.tracking.console import Console
from rein.types import Trajectory

Work = Callable[[Piece, Tell], pa.Table]


class Shards:
    """The pool of a stage, and what it has done."""

    def __init__(self, recipe: Recipe, console: Console, stage: str, *, kept: bool = False) -> None:
        self.recipe, self.console = recipe, console
        self.folder = ShardFolder(paths.stage_dir(recipe, stage) / "shards")
        self.spread = recipe.runtime == "ray"
        self.kept = kept or self.spread
        self.counts = {"found": 0, "computed": 0}

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {"shards": dict(self.counts)} if self.kept else {}

    def map(
        self,
        what: str,  # is done, for the progress bar
        make: Callable[[], Work[Piece]],
        pieces: Sequence[Piece],
        settings: Callable[[], Any],  # what the tables follow from beside their pieces: plain values
        content: Callable[[Piece], Sequence[bytes]],
    ) -> Iterator[tuple[int, pa.Table]]:
        """The table of each piece with the piece's index, in any order."""
        keys = self._keys(what, pieces, settings, content) if self.kept else []
        found = {i: table for i, key in enumerate(keys) if (table := self.folder.read(key)) is not None}
        missing = [i for i in range(len(pieces)) if i not in found]
        self.counts["found"] += len(found)
        rows = sum(table.num_rows for table in found.values())
        if found:
            self.console.say(f"{what}: {len(found)} of {len(pieces)} shards done before")
        yield from found.items()
        found.clear()
        left = allowed = self.recipe.restarts
        with self.console.progress(sum(len(pieces[i]) for i in missing), what) as advance:
            while missing:
                try:
                    pool = self._pool(again=left < allowed)
                    for index, table in self._done(pool, make, {i: pieces[i] for i in missing}, advance):
                        if self.kept:
                            self.folder.write(keys[index], table)
                        self.counts["computed"] += 1
                        rows += table.num_rows
                        missing.remove(index)
                        yield index, table
                except RankLost as error:
                    if not left:
                        raise
                    left -= 1
                    lost = str(error).partition(";")[0]
                    self.console.say(f"{lost}; going on, at most {left} more times after this")
                except EngineError as error:
                    if not self.kept:
                        raise
                    raise EngineError(
                        f"{error}; {rows} rows are kept and the same command goes on from there"
                    ) from error

    def tables(self, *given: Any) -> list[pa.Table]:
        """What `map` yields, in the order of the pieces."""
        found = dict(self.map(*given))
        return [found[i] for i in range(len(found))]

    def done(self) -> None:
        """The stage's own files are written."""
        if self.kept:
            self.folder.remove()

    def _keys(
        self,
        what: str,
        pieces: Sequence[Piece],
        settings: Callable[[], Any],
        content: Callable[[Piece], Sequence[bytes]],
    ) -> list[str]:
        common = json.dumps([__version__, what, settings()], sort_keys=True, default=repr).encode()
        return [content_key([common, *content(piece)]) for piece in pieces]

    def _done(
        self, pool: Pool, make: Callable[[], Work[Piece]], pieces: Mapping[int, Piece], advance: Tell
    ) -> Iterator[tuple[int, pa.Table]]:
        """What the pool finds of these pieces."""
        numbers = list(pieces)
        made = _Prepared(self.recipe, make) if self.spread else make
        with closing(pool.map(made, list(pieces.values()), advance)) as done:
            for place, table in done:
                yield numbers[place], table

    def _pool(self, *, again: bool) -> Pool:
        if not self.spread:
            return OneProcess()
        from rein.runtime.ray_pool import RayPool

        recipe, ray = self.recipe, self.recipe.ray
        return RayPool(
            recipe.ranks,
            cpus=ray.cpus_per_worker,
            gpus=ray.gpus_per_worker,
            address=ray.address,
            again=again,
        )


class _Prepared:
    """Makes a worker in a process that is set up as the recipe says."""

    def __init__(self, recipe: Recipe, make: Callable[[], Any]) -> None:
        threads = recipe.threads or max(int(recipe.ray.cpus_per_worker), 1)
        self.recipe, self.make = recipe.model_copy(update={"threads": threads}), make

    def __call__(self) -> Any:
        prepare_process(self.recipe)
        return self.make()


def cut(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The rows in their order, `size` at a time."""
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def key_of(recipe: Recipe, path: str, where: str) -> dict[str, str]:
    """Which numbers the model of a folder gives."""
    from rein.models.identity import model_key  # imports torch
    from rein.models.place import place_of

    return model_key(path, dtype=recipe.model.dtype, device=place_of(recipe.model).numbers, where=where)


def content_of(row: Trajectory) -> bytes:
    """All that a row holds but where it stood."""
    parts = []
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, np.ndarray):
            parts.append(f"{value.dtype} {len(value)} ".encode() + value.tobytes())
        elif field.name != "where":
            text = json.dumps(value, sort_keys=True, default=repr)
            parts.append(text.encode("utf-8", "surrogatepass"))
    return b"\0".join(parts)
