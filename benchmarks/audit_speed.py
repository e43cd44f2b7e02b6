"""How fast and in how much memory `rein audit` looks at a million trajectories, without a tokenizer.

Each row has 200 response ids and 200 log-probs, a prompt, a score and a group; one row in a thousand is bad
and one in a hundred an exact copy. The audit runs in a process of its own; its peak resident memory is the
process's (VmHWM). Reading starts with the file in the page cache. Usage: python benchmarks/audit_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import results_io

ROWS, TOKENS, CHUNK, VOCABULARY, ANSWERS = 1_000_000, 200, 20_000, 32_000, 4
COPIED, BAD = 100, 1000  # one row in so many
LEAST_ROWS_PER_S, MOST_GB = 50_000, 1.5


def tables(rows: int, ids: bool) -> Iterator[pa.Table]:
    """The data, a row group at a time; prompts as ids or as text."""
    rng = np.random.default_rng(0)
    for first in range(0, rows, CHUNK):
        n = min(CHUNK, rows - first)
        number = np.arange(first, first + n)
        tokens = (rng.zipf(1.3, size=(n, TOKENS)) % VOCABULARY).astype(np.int64)
        copied = np.flatnonzero((number % COPIED == 1) & (number > first))
        tokens[copied] = tokens[copied - 1]
        log_probs = -rng.exponential(0.7, size=(n, TOKENS)).astype(np.float32)
        log_probs[number % BAD == 7, 3] = np.nan
        question = number // ANSWERS
        prompt: pa.Array
        if ids:
            prompt = _lists((question[:, None] * 31 + np.arange(40)) % VOCABULARY)
        else:
            prompt = pa.array([f"Question {q}: what is {q % 997} times {q % 89}?" for q in question.tolist()])
        yield pa.table(
            {
                "prompt_ids" if ids else "prompt": prompt,
                "response_ids": _lists(tokens),
                "behavior_log_probs": _lists(log_probs),
                "score": rng.integers(0, 2, n).astype(np.float64),
                "group": pa.array([str(q) for q in question.tolist()]),
                "finish_reason": pa.array(["stop"] * n),
                "temperature": np.ones(n),
            }
        )


def _lists(values: Any) -> pa.ListArray:
    offsets = pa.array(np.arange(len(values) + 1) * values.shape[1], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))


def generate(path: Path, rows: int, codec: str, ids: bool) -> None:
    writer = None
    for table in tables(rows, ids):
        writer = writer or pq.ParquetWriter(path, table.schema, compression=codec)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def measure(path: Path) -> dict[str, Any]:
    """One audit, in this process."""
    from rein.config.recipe import Data
    from rein.data.audit import audit

    started, busy = time.perf_counter(), time.process_time()
    facts, _ = audit(path, Data())
    seconds, cpu = time.perf_counter() - started, time.process_time() - busy
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    rows, copies = facts["rows"], facts["duplicates"]["copies"]
    return {
        "rows": rows["total"],
        "usable": rows["usable"],
        "copies": copies,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "rows_per_s": round(rows["total"] / seconds),
        "peak_gb": round(int(peak.split()[1]) * 1024 / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the files are made; 2 GB are needed")
    parser.add_argument("--note", default="", help="said in the results, e.g. what else ran")
    parser.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Path(given.measure))))
        return
    found = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for codec, ids in (("zstd", False), ("snappy", True)):
            path = Path(folder) / "rows.parquet"
            generate(path, given.rows, codec, ids)
            prompts = "ids" if ids else "text"
            for repeat in range(given.repeats):
                command = [sys.executable, __file__, "--measure", str(path)]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                load = round(os.getloadavg()[0], 2)
                size = round(path.stat().st_size / 1e9, 3)
                about = {"codec": codec, "prompts": prompts, "file_gb": size, "repeat": repeat, "load": load}
                found.append(about | json.loads(said))
                print(found[-1], flush=True)
    settings = {"rows": given.rows, "tokens_per_row": TOKENS, "row_group": CHUNK, "note": given.note}
    results_io.write("audit_speed", settings, found, _text(found, given.note))


def _text(found: list[dict[str, Any]], note: str) -> str:
    head = ("codec, prompts", "file", "rows/s", "wall s", "CPU s", "peak memory", "load")
    rows = [
        (
            f"{r['codec']}, {r['prompts']}",
            f"{r['file_gb']} GB",
            f"{r['rows_per_s']:,}",
            r["seconds"],
            r["cpu_seconds"],
            f"{r['peak_gb']} GB",
            r["load"],
        )
        for r in found
    ]
    slowest, most = min(r["rows_per_s"] for r in found), max(r["peak_gb"] for r in found)
    met = "met" if slowest >= LEAST_ROWS_PER_S and most < MOST_GB else "NOT met"
    first = found[0]
    return (
        f"`rein audit` of {first['rows']:,} trajectories with {TOKENS} ids and log-probs each, exact copies "
        f"included, no tokenizer: {first['rows'] - first['usable']:,} bad rows and {first['copies']:,} "
        f"copies found.\n\nAsked: {LEAST_ROWS_PER_S:,} rows/s, under {MOST_GB} GB: {met}.\n\n"
        f"{results_io.table(head, rows)}\n\n{note}"
    )


if __name__ == "__main__":
    main()
