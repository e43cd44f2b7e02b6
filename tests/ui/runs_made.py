"""Small run folders as Rein leaves them, and hostile ones."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202egnp.exe \U0001f600 \x1b[31m"
SIDE = {"accuracy": 0.4, "score": 0.4, "accuracy_ci95": [0.3, 0.5], "response_length": 30.0, "n": 50}
EVALUATION = {
    "before": SIDE,
    "after": SIDE | {"accuracy": 0.9, "score": 0.9},
    "lift": 0.5,
    "lift_ci95": [0.4, 0.6],
    "n": 50,
    "by_data_source": {"addition": {"n": 50, "before": 0.4, "after": 0.9, "lift": 0.5}},
}


def write(path: Path, body: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = body if isinstance(body, str) else json.dumps(body)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path


def metrics_line(number: int, **more: Any) -> str:
    line = {"number": number, "time": 1.0 * number, "val/score": number / 100, "probe/kl_reference": 0.01}
    return json.dumps({**line, "actor/pg_loss": -0.1 * number, **more}) + "\n"


def make_run(
    folder: Path,
    *,
    stages: Sequence[str] = ("train", "evaluate"),
    done: Sequence[str] = ("train", "evaluate"),
    updates: int = 5,
    settings: Mapping[str, Any] | None = None,
    evaluation: Any = EVALUATION,
) -> Path:
    """A run that has done these of its stages."""
    write(
        folder / "recipe.json", {"out": str(folder), "seed": 1, "stages": list(stages)} | dict(settings or {})
    )
    for stage in done:
        body = {"version": 1, "stage": stage, "seconds": 3.5, "rows": {"in": 8, "rejected": 1, "trained": 7}}
        write(folder / stage / "manifest.json", body)
    write(folder / "train" / "metrics.jsonl", "".join(map(metrics_line, range(1, updates + 1))))
    if "evaluate" in done:
        write(folder / "evaluate" / "evaluation.json", evaluation)
    return folder


def write_trajectories(path: Path, count: int = 60, texts: Mapping[int, str] | None = None) -> Path:
    """Row i has score i / 10 and i % 7 + 1 tokens."""
    lengths = [i % 7 + 1 for i in range(count)]
    texts = texts or {}
    table = pa.table(
        {
            "prompt": [f"What is {i} + 1?" for i in range(count)],
            "response": [texts.get(i, f"It is number {i + 1}.") for i in range(count)],
            "response_ids": [list(range(n)) for n in lengths],
            "response_mask": [[True] * n for n in lengths],
            "behavior_log_probs": [[-0.5 * i] * n for i, n in enumerate(lengths)],
            "score": [i / 10 for i in range(count)],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=16)
    return path


def write_tokens(path: Path, piece: str = " world") -> Path:
    """One row of four tokens, as training records them: the last does not count."""
    floats = pa.list_(pa.float32())
    table = pa.table(
        {
            "row": ["part.parquet row 3"],
            "batch": [0],
            "prompt": ["Say hello"],
            "response": [f"Hello{piece}!"],
            "tokens": [["Hello", piece, "!", "<eos>"]],
            "response_ids": [[5, 6, 7, 1]],
            "response_mask": [[True, True, True, False]],
            "score": [1.0],
            "old_log_probs": pa.array([[-1.0, -2.0, -0.5, -9.0]], floats),
            "reference_log_probs": pa.array([[-1.0, -1.0, -1.0, -1.0]], floats),
            "behavior_log_probs": pa.array([None], floats),
            "advantages": pa.array([[0.5, float("nan"), -0.25, 0.0]], floats),
            "values": pa.array([None], floats),
            "weights": pa.array([[1.0, 1.0, 2.0, 1.0]], floats),
            "kl": pa.array([[0.0, 0.7, 0.1, 0.0]], floats),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path
