"""Work that is done amid a stage, kept until the stage is: one Parquet file a shard, named by its key.

The key is a hash of everything that the shard's table follows from, so a table that is found is the one that
would be made. Each file is written whole; one that cannot be read, or was written under another name, is not
there. Knows nothing of what the tables hold.
"""

import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rein.data.files import atomic

SHARD = re.compile(r"\.?[0-9a-f]{32}\.parquet(\.[0-9a-f]{8})?")  # and its drafts
KEY = b"rein.shard"
_UNREADABLE = (pa.ArrowException, OSError, ValueError)


class ShardFolder:
    """The shards of one stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> pa.Table | None:
        """The table kept under this key; None where there is none that is whole."""
        try:
            table = pq.read_table(self._file(key), partitioning=None, page_checksum_verification=True)
        except _UNREADABLE:
            return None
        return table if (table.schema.metadata or {}).get(KEY) == key.encode() else None

    def write(self, key: str, table: pa.Table) -> None:
        """Keep a table; raises CheckpointError where the disk does not."""
        noted = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: key.encode()})
        with atomic(self._file(key)) as draft:
            pq.write_table(noted, draft.absolute(), write_page_checksum=True)

    def remove(self) -> None:
        """All shards, of other work too, and the folder where nothing else lies in it."""
        with suppress(OSError):
            for file in self.folder.iterdir():
                if SHARD.fullmatch(file.name):
                    file.unlink(missing_ok=True)
            self.folder.rmdir()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.parquet"


def content_key(parts: Iterable[bytes]) -> str:
    """One hash of many parts, each with its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
