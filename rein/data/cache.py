"""What frozen models said of rows, kept in files: row key in, numbers out.

`folder/kind/<hash of key>/` holds one Parquet shard per call of `add`, each written whole under a name of
its own, so that two writers never touch the same file, and key.json, which says in words what the numbers
depend on. The key carries everything that decides the numbers; knows no model.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from rein.data import schemas
from rein.data.files import atomic, sources
from rein.data.parquet import read_batches, write_rows
from rein.errors import CheckpointError, DataError
from rein.types import Floats


class ScoreCache:
    """One kind of numbers under one key. `hits` and `misses` count rows asked for; `notes` are for people."""

    def __init__(self, folder: Path, kind: str, key: str) -> None:
        self.folder = Path(folder) / kind / hashlib.sha256(key.encode()).hexdigest()
        self.kind, self.key = kind, key
        self.hits = 0
        self.misses = 0
        self.notes: list[str] = []
        self._rows: dict[str, Floats] = {}
        for shard in sorted(self.folder.glob("*.parquet")) if self.folder.is_dir() else []:
            self._read(shard)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, row_key: str) -> Floats | None:
        """The row's numbers, or None where they are not known yet."""
        found = self._rows.get(row_key)
        self.hits += found is not None
        self.misses += found is None
        return found

    def add(self, rows: Mapping[str, Floats]) -> None:
        """Keep the numbers of these rows: in memory, and as one new shard."""
        if not rows:
            return
        kept = {row_key: np.array(values, dtype=np.float32) for row_key, values in rows.items()}
        note = self.folder / "key.json"
        if not note.exists():
            with suppress(CheckpointError), atomic(note) as draft:  # another may be writing the very same
                draft.write_text(json.dumps({"kind": self.kind, "key": self.key}, indent=2), encoding="utf-8")
        lines = [{schemas.ROW_KEY: row_key, schemas.VALUES: values} for row_key, values in kept.items()]
        write_rows(self.folder / f"{uuid.uuid4().hex}.parquet", lines, schemas.CACHE)
        self._rows |= kept

    def _read(self, shard: Path) -> None:
        found: dict[str, Floats] = {}
        try:
            for _, batch, _ in read_batches(sources(shard)[0]):
                if batch.schema.names != schemas.CACHE.names or batch.schema.types != schemas.CACHE.types:
                    raise DataError(f"{shard.name}: not a cache shard")
                values = batch.column(schemas.VALUES)
                flat = values.flatten().to_numpy(zero_copy_only=False)
                ends = np.cumsum(values.value_lengths().fill_null(0).to_numpy())
                keys = batch.column(schemas.ROW_KEY).to_pylist()
                found |= dict(zip(keys, np.split(flat, ends[:-1]), strict=True))
        except (DataError, OSError) as error:
            self.notes.append(
                f"cache: {self.kind} shard {shard.name} is left out, its rows are computed anew ({error})"
            )
            return
        self._rows |= found
