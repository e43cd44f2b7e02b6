"""The PPO update and the scoring pass beside the peers': tokens a CPU-second, memory, share of the peak.

    python benchmarks/update.py --model runs/smollm2 --batch .bench/batch.npz \\
        --peer 'verl=.bench/verl/bin/python benchmarks/peers/verl_update.py --dtype bf16 --budget 1024'

`peers/make_batch.py` makes the batch; `make bench` runs it beside the peers, `make bench-parts` with
`--parts`. Every measurement is a process of its own on one thread; rounds go over all of them in turn, so
that a disturbance is shared, and medians are reported. A peer is a name and the command of its script, in
its own environment; its JSON line is taken as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from results_io import into_page, table, write

RUN = Path(__file__).parent / "update_run.py"
PRECISIONS = ("exact", "fast")
MAIN: dict[str, dict[str, Any]] = {
    "Rein, update": {},
    "Rein, update, budget 1024": {"budget": 1024},
    "Rein, score": {"score": True},
}
# What each technique brings, one taken away or changed at a time.
PARTS: dict[str, dict[str, Any]] = {
    "all of it": {},
    "prompts not shared": {"share": False},
    "the head in chunks of the graph": {"head": "chunks"},
    "products, norms, gates and attention as the model has them": {"steps": False},
    "freed memory given back": {"keep_memory": False},
    "compiled": {"compile": True},
    "gradient checkpointing": {"checkpointing": True},
    "logits chunk 2^20": {"logits_chunk": 2**20},
    "logits chunk 2^26": {"logits_chunk": 2**26},
    **{f"budget {budget}": {"budget": budget} for budget in (512, 1024, 4096)},
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
        for name, what in (PARTS if args.parts else MAIN).items():
            if args.only and name not in args.only:
                continue
            found[f"{name}, {precision}"] = own(args, what | {"precision": precision})
    return found | {name: peers(args, command) for name, command in named(args.peer).items()}


def named(given: list[str]) -> dict[str, str]:
    return {name: command for name, _, command in (peer.partition("=") for peer in given)}


def peers(args: argparse.Namespace, command: str, *more: str) -> list[str]:
    words = ["--batch", str(args.batch), "--model", args.model, "--limit", str(args.limit), "--threads", "1"]
    return [*shlex.split(command), *words, *more]


def distances(args: argparse.Namespace) -> list[list[str]]:
    """How far log-probs and gradients are from a float32 loop over the rows, ours and the peers'."""
    columns = (
        "log_prob_error_max",
        "log_prob_error_mean",
        "actor_gradient_error_max",
        "critic_gradient_error_max",
    )
    with tempfile.TemporaryDirectory() as folder:
        true, said = Path(folder) / "true.npz", Path(folder) / "said.npz"
        body = []
        for precision in PRECISIONS:
            found = line_of(own(args, {"precision": precision}, "--compare", "--dump", str(true)))
            body.append([f"Rein, {precision}", *(f"{found[column]:.2g}" for column in columns)])
        for name, command in named(args.peer).items():
            if "--score" in command:
                line_of(peers(args, command, "--dump", str(said)))
                gap = np.abs(np.load(said)["logp"] - np.load(true)["logp"])
                body.append([name, f"{gap.max():.2g}", f"{gap.mean():.2g}", "", ""])
    return body


def measured(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """By name, a line of each round; what `--keep` has of the same commands is not measured again."""
    known: dict[tuple[str, int], dict[str, Any]] = {}
    if args.keep and args.keep.exists():
        for line in map(json.loads, args.keep.read_text().splitlines()):
            known[line["measurement"], line["round"]] = line
    lines: dict[str, list[dict[str, Any]]] = {}
    for number in range(1, args.rounds + 1):
        for name, command in wanted(args).items():
            line = known.get((name, number), {})
            if line.get("command") != command:
                line = line_of(command) | {"measurement": name, "round": number, "command": command}
                if args.keep:
                    with args.keep.open("a") as file:
                        file.write(json.dumps(line) + "\n")
            lines.setdefault(name, []).append(line)
            print(f"round {number}: {name}: {line['cpu_seconds']} cpu-s", flush=True)
    return lines


def times(lines: dict[str, list[dict[str, Any]]], peers: list[str]) -> str:
    """How many times a peer's CPU seconds ours fit into: of each round, for the machine drifts; medians."""
    body = []
    for peer in peers:
        kind = "score" if "score" in peer else "update"
        cells = []
        for precision in PRECISIONS:
            ours = lines.get(f"Rein, {kind}, {precision}", [])
            pairs = zip(lines[peer], ours, strict=False)
            ratios = [other["cpu_seconds"] / own["cpu_seconds"] for other, own in pairs]
            cells.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        body.append([peer, *cells])
    return table(["CPU seconds, times Rein's", *PRECISIONS], body)


def middle(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: medians over the rounds."""
    seconds = [line["cpu_seconds"] for line in lines]
    row: dict[str, Any] = {"cpu_seconds": round(statistics.median(seconds), 2), "all_cpu_seconds": seconds}
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
    parser.add_argument(
        "--keep", type=Path, help="measurements, from which a broken run goes on; then deleted"
    )
    parser.add_argument("--name", help="of the result files; update, or update_parts")
    parser.add_argument("--parts", action="store_true", help="what each technique brings, without peers")
    parser.add_argument("--only", action="append", default=[], help="these of our measurements")
    parser.add_argument(
        "--compare-limit", type=int, default=16, help="trajectories held against a plain loop"
    )
    args = parser.parse_args()
    lines = measured(args)
    rows = [{"name": name} | middle(some) for name, some in lines.items()]
    head = ["measurement", "cpu-s", "tokens / cpu-s", "peak MB", "MFU", "GEMM peak, GFLOP/s"]
    columns = ("name", "cpu_seconds", "tokens_per_cpu_second", "peak_rss_mb", "mfu", "peak_gflops")
    text = table(head, [[row.get(column, "") for column in columns] for row in rows])
    if args.peer:
        text += "\n\n" + times(lines, list(named(args.peer)))
    settings = {"limit": args.limit, "rounds": args.rounds, "peers": args.peer}
    if not args.parts:
        args.limit = args.compare_limit
        settings["distances"] = far = distances(args)
        text += f"\n\nAgainst a float32 loop over {args.limit} rows, one by one:\n\n"
        text += table(["", "log-probs, max", "mean", "actor's gradients, worst", "critic's"], far)
    if args.peer and not (args.name or args.parts or settings["limit"]):
        into_page("update", text.partition("\n\nAgainst")[0])
    write(args.name or ("update_parts" if args.parts else "update"), settings, rows, text)
    if args.keep:
        args.keep.unlink(missing_ok=True)
    print(text)


if __name__ == "__main__":
    main()
