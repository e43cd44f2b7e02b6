"""`rein ui` over 50 runs and a file of 100,000 rows: seconds until a page answers, and the server's memory.

    python benchmarks/ui.py [--runs 50] [--rows 100000] [--updates 1000] [--data DIR]

The pages are served by a process of its own and asked over HTTP, the first time and again. Rows have 200
tokens, each with an id, a mask and a behavior log-prob, as Rein writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import results_io

TOKENS, GROUP = 200, 8192
FILE = "score/trajectories.parquet"
AT = f"/rows?name=run-00&file={FILE}"
ASKED = {
    "list of runs": "/",
    "one run": "/run?name=run-01",
    "six runs compared": "/compare?" + "&".join(f"run=run-{i:02d}" for i in range(6)),
    "rows, first page": AT,
    "rows, page 2,000": f"{AT}&page=2000",
    "rows, score at least 2": f"{AT}&score_min=2",
    "rows, at most 150 tokens": f"{AT}&length_max=150",
    "rows, text": f"{AT}&q=w04999",
    "rows, by score": f"{AT}&sort=score",
    "rows, score and text, by length": f"{AT}&score_min=1&q=w04999&sort=length",
    "rows, by mean log-prob": f"{AT}&sort=behavior",
    "one row": f"/row?name=run-00&file={FILE}&row=99999",
}
NOT_WITHIN = ("rows, by mean log-prob",)  # reads 20 million numbers


def make_runs(folder: Path, count: int, updates: int) -> None:
    """Runs with metrics of about 1 KB a line, a validation every 25th update, an evaluation."""
    rng = np.random.default_rng(0)
    for i in range(count):
        run = folder / f"run-{i:02d}"
        for stage in ("train", "evaluate"):
            (run / stage).mkdir(parents=True)
            body = {"version": 1, "stage": stage, "seconds": 10.0, "rows": {"in": 1000, "rejected": 0}}
            (run / stage / "manifest.json").write_text(json.dumps(body))
        (run / "recipe.json").write_text(json.dumps({"seed": i, "stages": ["train", "evaluate"]}))
        side = {"accuracy": 0.4, "score": 0.4, "accuracy_ci95": [0.3, 0.5], "n": 500}
        after = side | {"accuracy": 0.9, "score": 0.9}
        judged = {"before": side, "after": after, "lift": 0.5, "lift_ci95": [0.45, 0.55], "n": 500}
        (run / "evaluate" / "evaluation.json").write_text(json.dumps(judged))
        names = ["actor/pg_loss", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "critic/vf_loss"]
        names += [f"rollout_corr/m{j}" for j in range(25)]
        with (run / "train" / "metrics.jsonl").open("w") as file:
            for number in range(1, updates + 1):
                values = dict(zip(names, rng.normal(size=len(names)).tolist(), strict=True))
                if number % 25 == 0:
                    values |= {"val/score": number / updates, "probe/kl_reference": 0.02}
                file.write(json.dumps({"number": number, "time": float(number), **values}) + "\n")


def make_rows(path: Path, rows: int) -> None:
    """Answers of 200 tokens; the words of one are about 700 characters."""
    rng = np.random.default_rng(1)
    words, writer = [f"w{i:05d}" for i in range(5000)], None
    path.parent.mkdir(parents=True, exist_ok=True)
    for first in range(0, rows, GROUP):
        n = min(GROUP, rows - first)
        lengths = rng.integers(TOKENS // 2, TOKENS * 3 // 2 + 1, n)
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        total = int(lengths.sum())

        def lists(values: Any, ends: pa.Array = ends) -> pa.Array:
            return pa.ListArray.from_arrays(ends, pa.array(values))

        table = pa.table(
            {
                "prompt": [f"What is {first + i} plus {i}?" for i in range(n)],
                "response": [" ".join(words[j] for j in rng.integers(0, 5000, 100)) for _ in range(n)],
                "response_ids": lists(rng.integers(0, 50_000, total)),
                "response_mask": lists(np.ones(total, bool)),
                "behavior_log_probs": lists((-rng.exponential(0.3, total)).astype(np.float32)),
                "score": rng.normal(size=n),
                "finish_reason": ["stop"] * n,
            }
        )
        writer = writer or pq.ParquetWriter(path, table.schema, write_page_checksum=True)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else float("nan")


def asked(base: str, pid: int, address: str) -> tuple[float, float, int]:
    """Seconds, CPU seconds of the server, bytes of one answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    cpu, started = cpu_seconds(pid), time.monotonic()
    with opener.open(base + address, timeout=300) as answer:
        size = len(answer.read())
    return time.monotonic() - started, cpu_seconds(pid) - cpu, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--data", type=Path, help="where the data lie, or are made")
    given = parser.parse_args()
    data = given.data or Path(tempfile.mkdtemp())
    if not (data / "run-00" / FILE).exists():
        make_runs(data, given.runs, given.updates)
        make_rows(data / "run-00" / FILE, given.rows)
    command = [sys.executable, "-u", "-m", "rein", "ui", str(data), "--port", "0"]
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://[\d.:]+", server.stdout.readline())
        assert found, "the server has not started"
        for name, address in ASKED.items():
            first = asked(found[0], server.pid, address)
            again = asked(found[0], server.pid, address)
            peak = peak_mb(server.pid)
            row = {"page": name, "seconds": first[0], "cpu_seconds": first[1], "again": again[0]}
            rows.append(row | {"bytes": first[2], "peak_mb": peak})
            print(
                {key: value if isinstance(value, str) else round(value, 3) for key, value in rows[-1].items()}
            )
        server.terminate()
    report(given, rows, (data / "run-00" / FILE).stat().st_size)


def report(given: argparse.Namespace, rows: list[dict[str, Any]], size: int) -> None:
    head = ["page", "first, s", "server's CPU, s", "again, s", "KB", "peak MB so far"]
    cells = [
        [
            row["page"],
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['again']:.2f}",
            f"{row['bytes'] / 1024:.0f}",
            f"{row['peak_mb']:.0f}",
        ]
        for row in rows
    ]
    within = [row for row in rows if row["page"] not in NOT_WITHIN]
    slow = [row["page"] for row in within if row["seconds"] >= 1]
    busy = [row["page"] for row in within if row["cpu_seconds"] >= 1]
    peak = max(row["peak_mb"] for row in rows)
    text = (
        f"{given.runs} runs of {given.updates:,} updates; {given.rows:,} rows of {TOKENS} tokens in one file "
        f"of {size / 2**20:.0f} MB. Each page is asked for twice, in this order, of one server on one core, "
        f"of which the machine's other work wanted its share: load average {os.getloadavg()[0]:.1f}.\n\n"
        f"{results_io.table(head, cells)}\n\n"
        "A second or more, but for the mean log-prob, which reads every number: "
        f"{', '.join(slow) or 'none'}; by CPU time: {', '.join(busy) or 'none'}. Peak memory {peak:.0f} MB."
    )
    settings = {"runs": given.runs, "rows": given.rows, "updates": given.updates, "tokens": TOKENS}
    results_io.write("ui", settings, rows, text)
    print(text)


if __name__ == "__main__":
    main()
