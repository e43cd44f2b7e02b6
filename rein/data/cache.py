"""What frozen models said of rows, kept in files that runs share: row key in, numbers out.

`folder/kind/<hash of key>/` holds one Parquet shard per call of `add`, each written whole under a name of
its own, so that two writers never touch the same file, and key.json, which says in words what the numbers
depend on. The key carries everything that decides the numbers; knows no model.
"""

import hashlib
import json
import os
import re
import time
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

NOTE = "key.json"
SHARD = re.compile(r"[0-9a-f]{32}\.parquet")
DRAFT = re.compile(r"\.(?:[0-9a-f]{32}\.parquet|key\.json)\.[0-9a-f]{8}")
STALE_S = 3600.0  # no shard takes so long to write: its writer was killed


class ScoreCache:
    """One kind of numbers under one key. `hits` and `misses` count rows asked for; `notes` are for people."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        key: Mapping[str, str],
        about: Mapping[str, str] | None = None,  # told to people, no part of the key
    ) -> None:
        self.folder = Path(folder) / kind / key_hash(key)
        self.kind, self.key, self.about = kind, dict(key), dict(about or {})
        self.hits = 0
        self.misses = 0
        self.notes: list[str] = []
        self._rows: dict[str, Floats] = {}
        for shard in sorted(self.folder.glob("*.parquet")) if self.folder.is_dir() else []:
            self._read(shard)
        with suppress(OSError):
            os.utime(self.folder / NOTE)  # last used

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row_key: str) -> bool:
        """Whether the row is known; counts nothing."""
        return row_key in self._rows

    @property
    def counts(self) -> dict[str, int]:
        return {"hits": self.hits, "misses": self.misses}

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
        lines = [{schemas.ROW_KEY: row_key, schemas.VALUES: values} for row_key, values in kept.items()]
        for last_try in (False, True):
            self._sweep()
            self._tell()
            try:
                write_rows(self.folder / f"{uuid.uuid4().hex}.parquet", lines, schemas.CACHE)
                break
            except CheckpointError:
                if last_try or self.folder.exists():  # else another has pruned it just now
                    raise
        self._rows |= kept

    def _tell(self) -> None:
        note = self.folder / NOTE
        if not note.exists():
            body = {"kind": self.kind, "key": self.key, "about": self.about}
            with suppress(CheckpointError), atomic(note) as draft:  # another may be writing the very same
                draft.write_text(json.dumps(body, indent=2, ensure_ascii=False), encoding="utf-8")

    def _sweep(self) -> None:
        """Remove the drafts of writers that were killed."""
        with suppress(OSError):
            for file in self.folder.iterdir():
                if DRAFT.fullmatch(file.name) and time.time() - file.stat().st_mtime > STALE_S:
                    file.unlink(missing_ok=True)

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


def key_hash(key: Mapping[str, str]) -> str:
    """The name of the folder that holds what was computed under this key."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
