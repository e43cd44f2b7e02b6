"""Rows as another tool writes them, through `rein convert` and back."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats_made import Convert, Converted

from rein.commands.convert import run
from rein.data.formats.layout import Options
from rein.data.parquet import read_rows
from rein.tracking.console import Console


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Write each file's rows as JSON lines (or Parquet), convert them, read what was written."""

    def one(
        *files: list[dict[str, Any]],
        form: str = "auto",
        to: str | None = None,
        parquet: bool = False,
        bad: float = 1.0,
        options: Options | None = None,
    ) -> Converted:
        names = []
        for i, rows in enumerate(files):
            path = tmp_path / f"in{i}.{'parquet' if parquet else 'jsonl'}"
            if parquet:
                pq.write_table(pa.Table.from_pylist(rows), path)
            else:
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            names.append(str(path))
        out = tmp_path / "out.parquet"
        capsys.readouterr()
        run(names, str(out), Console(), form=form, to=to, max_bad_fraction=bad, options=options, force=True)
        rejects = out.with_name("out.parquet.rejects.jsonl")
        lines = rejects.read_text(encoding="utf-8").splitlines() if rejects.exists() else []
        return Converted(
            [{k: v for k, v in row.items() if v is not None} for _, row in read_rows(out)],
            capsys.readouterr().out,
            [json.loads(line) for line in lines],
            out,
        )

    return one
