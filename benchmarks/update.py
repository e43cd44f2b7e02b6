"""The PPO update and the scoring pass beside the peers': tokens a CPU-second, memory, share of the peak.

    python benchmarks/update.py --model runs/smollm2 --batch .bench/batch.npz \\
        --peer 'verl=.bench/verl/bin/python benchmarks/peers/verl_update.py --dtype bf16 --budget 1024'

`peers/make_batch.py` makes the batch; `make bench` runs all of it. Every measurement is a process of its own
on one thread; rounds go over all of them in turn, so that a disturbance is shared, and medians are reported.
A peer is a name and the command of its script, in its own environment; its JSON line is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

RUN = Path(__file__).parent / "update_run.py"
PRECISIONS = ("exact", "fast")
OURS: dict[str, dict[str, Any]] = {
    "Rein, update": {},
    "without shared prompts": {"share": False},
    "without the head in one step": {"head": "chunks"},
    "freed memory given back": {"keep_memory": False},
    "compiled": {"compile": True},
    "gradient checkpointing": {"checkpointing": True},
    "logits chunk 2^22": {"logits_chunk": 2**22},
    "logits chunk 2^25": {"logits_chunk": 2**25},
    "budget 512": {"budget": 512},
    "budget 2048": {"budget": 2048},
    "budget 4096": {"budget": 4096},
    "Rein, score": {"score": True},
    **{f"{n} answers a prompt": {"n": n} for n in (2, 4, 8, 16)},
    **{f"{n} answers a prompt, not shared": {"n": n, "share": False} for n in (2, 4, 8, 16)},
}


def line_of(command: list[str]) -> dict[str, Any]:
    """The JSON line that a measurement prints last."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def own(args: argparse.Namespace, what: dict[str, Any], *more: str) -> list[str]:
    words = [sys.executable, str(RUN), "--model", args.model, "--batch", str(args.batch), *more]
    return [*words, "--limit", str(args.limit), "--what", json.dumps(what)]


def wanted(args: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of every measurement, by name."""
    found = {}
    for precision in PRECISIONS:
        for name, what in OURS.items():
            if args.only and name not in args.only:
                continue
            found[f"{name}, {precision}"] = own(args, what | {"precision": precision})
    for peer in args.peer:
        name, _, command = peer.partition("=")
        more = [
            "--batch",
            str(args.batch),
            "--model",
            args.model,
            "--limit",
            str(args.limit),
            "--threads",
            "1",
        ]
        found[name] = [*shlex.split(command), *more]
    return found


def middle(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: medians over the rounds."""
    seconds = [line["cpu_seconds"] for line in lines]
    row: dict[str, Any] = {"cpu_seconds": statistics.median(seconds), "all_cpu_seconds": seconds}
    row["tokens_per_cpu_second"] = round(lines[0]["tokens"] / row["cpu_seconds"], 1)
    row["peak_rss_mb"] = statistics.median(line["peak_rss_mb"] for line in lines)
    if "mfu" in lines[0]:
        row["mfu"] = statistics.median(line["mfu"] for line in lines)
        row["peak_gflops"] = statistics.median(line["peak_gflops"] for line in lines)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="the first so many trajectories")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], help="name=command")
    parser.add_argument("--only", action="append", default=[], help="these of our measurements")
    parser.add_argument(
        "--compare-limit", type=int, default=16, help="trajectories held against a plain loop"
    )
    args = parser.parse_args()
    lines: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name, command in wanted(args).items():
            lines.setdefault(name, []).append(line_of(command))
            print(f"round {number + 1}: {name}: {lines[name][-1]['cpu_seconds']} cpu-s", flush=True)
    rows = [{"name": name} | middle(some) for name, some in lines.items()]
    args.limit = args.compare_limit
    errors = [line_of(own(args, {"precision": p}, "--compare")) for p in PRECISIONS]
    head = ["measurement", "cpu-s", "tokens / cpu-s", "peak MB", "MFU", "GEMM peak, GFLOP/s"]
    columns = ("name", "cpu_seconds", "tokens_per_cpu_second", "peak_rss_mb", "mfu", "peak_gflops")
    shown = [[row.get(column, "") for column in columns] for row in rows]
    kinds = ("log_prob_error_max", "log_prob_error_mean", "actor_gradient_error_max")
    kinds = (*kinds, "critic_gradient_error_max")
    far = [
        [p, *(f"{error[kind]:.2g}" for kind in kinds)] for p, error in zip(PRECISIONS, errors, strict=True)
    ]
    text = table(head, shown) + "\n\nAgainst a float32 loop over the rows, one by one:\n\n"
    text += table(["precision", "log-probs, max", "mean", "actor's gradients, worst", "critic's"], far)
    settings = {"limit": args.limit, "rounds": args.rounds, "peers": args.peer}
    write("update", settings, [*rows, *errors], text)
    print(text)


if __name__ == "__main__":
    main()
