"""Stored trajectories -> a trained actor: `rein train` beside the same job in TRL's and verl's own code.

    python benchmarks/end_to_end.py --model runs/smollm2 --batch .bench/batch.npz \\
        --peer 'verl bf16=.bench/verl/bin/python benchmarks/peers/verl_update.py --dtype bf16 --budget 512'

64 trajectories of SmolLM2-135M with log-probs and scores, once over them in mini-batches of 16: log-probs
of reference and old policy, values, advantages, both updates with their optimizer steps, the trained actor
in a Hugging Face folder. Rein runs from Parquet (end_to_end.yaml), cold and then again into another folder
with the cache that the first run filled: what the reference says of a row is computed once. A peer is a name
and the command of its script in `peers/`, which does with `--loop` what its trainer does. Every run is a
process of its own on one thread; its CPU seconds, wall seconds and peak memory are the operating system's,
from start to end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES
from rein.tracking.jsonl import read_metrics

RECIPE = Path(__file__).parent / "end_to_end.yaml"
ROWS, MINI = 64, 16
PRECISIONS = ("exact", "fast")
PHASES = ("ref", "old_log_prob", "values", "adv", "update_critic", "update_actor", "save_checkpoint")
BOTH = "update_actor_and_critic"  # of a peer with one loss for both
TIMING = "timing_s/"
Row = dict[str, Any]


def write_trajectories(batch: Path, limit: int, target: Path) -> int:
    """The stored batch as Parquet, the last return of an answer in the place of its score; how many rows."""
    stored = np.load(batch)
    count = min(limit or ROWS, len(stored["plen"]))
    prompts = np.split(stored["prompt"], np.cumsum(stored["plen"])[:-1])
    ends = np.cumsum(stored["rlen"])[:-1]
    answers, log_probs, returns = (np.split(stored[name], ends) for name in ("resp", "old_logp", "ret"))
    rows = [
        {
            "prompt_ids": prompts[i].tolist(),
            "response_ids": answers[i].tolist(),
            "behavior_log_probs": np.minimum(log_probs[i], 0).tolist(),
            "score": float(returns[i][-1]),
            "group": str(stored["group"][i]),
        }
        for i in range(count)
    ]
    write_rows(target, rows, TRAJECTORIES)
    return count


def measured(command: list[str], folder: Path) -> tuple[Row, str]:
    """What a process took from start to end, and its stdout."""
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out, error = folder / "stdout", folder / "stderr"
    with out.open("w") as stdout, error.open("w") as stderr:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=one_thread)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit {process.returncode}\n{error.read_text()[-2000:]}")
    found = {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "seconds": round(seconds, 2),
        "peak_rss_mb": round(used.ru_maxrss / 1024),
    }
    return found, out.read_text()


def told(run: Path) -> Row:
    """What a run says of itself: seconds by phase, the newest `perf/...`, the share outside models.

    Empty where it says nothing. `timing_s/step` is a sum of others.
    """
    phases: dict[str, float] = {}
    perf: dict[str, float] = {}
    for line in read_metrics(run / "metrics.jsonl"):
        known = {name: value for name, value in line.items() if value is not None}
        perf |= {name: value for name, value in known.items() if name.startswith("perf/")}
        for name, value in known.items():
            phase = name.removeprefix(TIMING)
            if phase not in (name, "step"):
                phases[phase] = phases.get(phase, 0.0) + value
    facts = json.loads((run / "manifest.json").read_text())["facts"]
    speed = facts.get("speed", {})
    return {"phases": phases, "perf": perf, "outside_models": speed.get("outside_models")}


def rein_runs(args: argparse.Namespace, precision: str, folder: Path) -> list[Row]:
    """Cold, then with the cache of the cold run."""
    rows = []
    for name in ("cold", "cached"):
        out = folder / name
        words = {
            "out": out, "cache": folder / "cache", "model.path": args.model, "model.precision": precision,
            "data.train_files": folder / "trajectories.parquet", "data.train_batch_size": args.rows,
            "actor.ppo_mini_batch_size": min(MINI, args.rows), "trainer.total_epochs": args.epochs,
        }  # fmt: skip
        command = [sys.executable, "-m", "rein", "train", str(RECIPE)]
        row, _ = measured([*command, *(f"{key}={value}" for key, value in words.items())], folder)
        train = out / "train"
        row |= {"name": f"Rein {precision}, {name}"} | told(train)
        row["cache"] = json.loads((train / "manifest.json").read_text())["facts"]["cache"]
        rows.append(row)
        shutil.rmtree(out)
    return rows


def peer_run(args: argparse.Namespace, peer: str, folder: Path) -> Row:
    name, _, command = peer.partition("=")
    more = ["--batch", str(args.batch), "--model", args.model, "--limit", str(args.rows), "--threads", "1"]
    more += ["--loop", str(folder / "trained"), "--mini", str(MINI)]  # one epoch
    row, said = measured([*shlex.split(command), *more], folder)
    line = json.loads(said.strip().splitlines()[-1])
    return row | {"name": name, "phases": line["phases_seconds"], "said": line}


def rounds_of(args: argparse.Namespace) -> dict[str, list[Row]]:
    """All ways in turn, so that a disturbance is shared."""
    found: dict[str, list[Row]] = {}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="rein-end-to-end-") as name:
            folder = Path(name)
            args.rows = write_trajectories(args.batch, args.limit, folder / "trajectories.parquet")
            rows = [row for precision in args.precision for row in rein_runs(args, precision, folder)]
            rows += [peer_run(args, peer, folder) for peer in args.peer]
        for row in rows:
            found.setdefault(row["name"], []).append(row)
            said = f"{row['cpu_seconds']} cpu-s, {row['seconds']} s, {row['peak_rss_mb']} MB"
            print(f"round {number + 1}: {row['name']}: {said}", flush=True)
    return found


def middle(rows: list[Row]) -> Row:
    """The round of median CPU seconds, with the medians of the others' totals."""
    row = sorted(rows, key=lambda row: row["cpu_seconds"])[len(rows) // 2]
    for name in ("cpu_seconds", "seconds", "peak_rss_mb"):
        row[f"all_{name}"] = [one[name] for one in rows]
    return row | {"seconds": statistics.median(row["all_seconds"])}


def cells(row: Row) -> list[Any]:
    """Wall seconds by phase and what is left; a dash where the run does not say."""
    phases = row["phases"]
    known = [phases.get(name) for name in PHASES]
    if BOTH in phases:
        known[PHASES.index("update_actor")] = phases[BOTH]
    spent = [seconds for seconds in known if seconds is not None]
    shown: list[Any] = [f"{seconds:.1f}" if seconds is not None else "-" for seconds in known]
    if BOTH in phases:
        shown[PHASES.index("update_critic")] = "with the actor's"
    rest = f"{row['seconds'] - sum(spent):.1f}" if spent else "-"
    return [
        row["name"],
        f"{row['cpu_seconds']:.1f}",
        f"{row['seconds']:.1f}",
        row["peak_rss_mb"],
        *shown,
        rest,
    ]


def reference_of(rows: dict[str, Row], precision: str) -> str:
    """What the cache saved of the reference pass, by its own clock, else by the whole runs' difference."""
    cold, cached = (rows[f"Rein {precision}, {name}"] for name in ("cold", "cached"))
    counts = {name: row["cache"].get("ref_log_probs", {}) for name, row in (("a", cold), ("b", cached))}
    said = (
        f"`{precision}`: the cold run computed {counts['a'].get('misses')} reference rows, the cached one "
        f"{counts['b'].get('misses')}"
    )
    ref = [row["phases"].get("ref") for row in (cold, cached)]
    if ref[0] is not None:
        return f"{said}: {ref[0]:.1f} s and {ref[1] or 0:.1f} s."
    less = cold["cpu_seconds"] - cached["cpu_seconds"]
    return f"{said} and took {less:.1f} CPU seconds less."


def text_of(args: argparse.Namespace, rows: dict[str, Row]) -> str:
    head = ["way", "CPU s", "wall s", "peak MB", *PHASES, "the rest"]
    text = [
        f"{args.rows} trajectories, mini-batches of {min(MINI, args.rows)}, epochs: {args.epochs}, one "
        "thread. CPU, wall and memory are of the whole process; the phases are wall seconds, and the rest is "
        "imports, models, files and what else a run does.",
        table(head, [cells(row) for row in rows.values()]),
    ]
    text += [reference_of(rows, precision) for precision in args.precision]
    for name, row in rows.items():
        if row.get("outside_models") is not None:
            text.append(f"{name}: {100 * row['outside_models']:.1f} % of its own time outside models.")
    return "\n\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0, help="the first so many trajectories")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1, help="of Rein; peers make one")
    parser.add_argument("--peer", action="append", default=[], help="name=command")
    parser.add_argument("--name", default="end_to_end", help="of the files in results/")
    args = parser.parse_args()
    if args.peer and args.epochs != 1:
        parser.error("--epochs: the peers' scripts make one epoch")
    rows = {name: middle(some) for name, some in rounds_of(args).items()}
    settings = {
        "rows": args.rows,
        "mini": MINI,
        "epochs": args.epochs,
        "rounds": args.rounds,
        "peers": args.peer,
    }
    text = text_of(args, rows)
    write(args.name, settings, list(rows.values()), text)
    print(text)


if __name__ == "__main__":
    main()
