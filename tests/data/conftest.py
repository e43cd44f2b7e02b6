"""Encoders, limits, and files made on the spot."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_made import CHAT, Load, WriteParquet, characters, text_ids

from rein.config.recipe import Data
from rein.data.loader import Loaded, load_trajectories
from rein.data.tokenize import Encoder
from rein.types import Trajectory

ONE, TWO = text_ids("12")


@pytest.fixture
def raw() -> Encoder:
    """Characters, no template: raw text, stop id 1."""
    return Encoder(characters(), apply_chat_template=None, stop_ids={1})


@pytest.fixture
def chat() -> Encoder:
    """Characters with a chat template that writes BOS, and a tokenizer that would write it again."""
    return Encoder(characters(template=CHAT, adds_bos=True), apply_chat_template=None, stop_ids={1})


@pytest.fixture
def data() -> Data:
    """Limits that no test row meets by accident, and no tolerance for bad rows to hide in."""
    return Data(max_prompt_length=64, max_response_length=64, max_bad_fraction=1.0)


@pytest.fixture
def parquet(tmp_path: Path) -> WriteParquet:
    """Write rows as plain Parquet, as any other tool would."""

    def write(
        rows: list[dict[str, Any]], name: str = "rows.parquet", schema: pa.Schema | None = None
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
        return path

    return write


@pytest.fixture
def jsonl(tmp_path: Path) -> WriteParquet:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(jsonl: WriteParquet, raw: Encoder, data: Data) -> Load:
    """One trajectory row through the loader."""

    def one(
        encoder: Encoder = raw, recipe: Data = data, scored: bool = False, **columns: Any
    ) -> Loaded[Trajectory]:
        row = {"prompt": "1+1=", "response_ids": [TWO, 1], "temperature": 1.0} | columns
        row = {key: value for key, value in row.items() if value is not ...}
        filler = {
            "prompt": "f",
            "response_ids": [ONE],
            "temperature": 1.0,
            "score": 0.0,
            "behavior_log_probs": [-1.0],
        }
        loaded = load_trajectories(jsonl([row, filler]), encoder, recipe, scored=scored)
        kept = [r for r in loaded.rows if r.where.endswith("row 0")]
        return Loaded(kept, loaded.rejects, loaded.total, loaded.notes)

    return one
