"""What a bigger batch costs: one update of SmolLM2-135M from 2,000 to 64,000 tokens, and one long answer.

    python benchmarks/growth.py --model runs/smollm2 --batch .bench/batch.npz [--sizes 2048 4096]

Actor and critic, forward and backward, the token budget held: CPU seconds per token and peak memory should
stay where they are while the batch grows. Peak memory follows the budget: one size is repeated with larger
ones. Last, an answer of 8,000 tokens is trained on alone, with and without gradient checkpointing. Every
measurement is a process of its own on one thread (growth_run.py); sizes that take seconds are measured
`--rounds` times, and the median stands.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write
from update import line_of

RUN = Path(__file__).parent / "growth_run.py"
SIZES = (2048, 4096, 8192, 16384, 32768, 65536)
BUDGET, MORE_BUDGETS, AT_SIZE = 1024, (2048, 4096), 8192
SHORT = 8192  # tokens up to which rounds are repeated
ROOM_MB = 12 * 1024  # what a long answer has to fit into
HEADS = {
    "micro_batches": "micro-batches",
    "cpu_seconds": "CPU s",
    "cpu_ms_per_token": "CPU ms / token",
    "peak_rss_mb": "peak MB",
}
Row = dict[str, Any]


def measured(args: argparse.Namespace, precision: str, *words: str, rounds: int = 1) -> Row:
    """One row: the median of the rounds, the highest of the peaks."""
    command = [sys.executable, str(RUN), "--model", args.model, "--batch", str(args.batch)]
    lines = [line_of([*command, "--precision", precision, *words]) for _ in range(rounds)]
    row: Row = sorted(lines, key=lambda line: line["cpu_seconds"])[len(lines) // 2]
    row["all_cpu_seconds"] = [line["cpu_seconds"] for line in lines]
    row["peak_rss_mb"] = max(line["peak_rss_mb"] for line in lines)
    print(f"{precision} {' '.join(words)}: {row['cpu_seconds']} cpu-s, {row['peak_rss_mb']} MB", flush=True)
    return row


def sizes_of(args: argparse.Namespace, precision: str) -> list[Row]:
    rows = []
    for size in args.sizes:
        rounds = args.rounds if size <= SHORT else 1
        words = ("--tokens", str(size), "--budget", str(BUDGET))
        rows.append(measured(args, precision, *words, rounds=rounds) | {"part": "size"})
    return rows


def budgets_of(args: argparse.Namespace, precision: str) -> list[Row]:
    size = str(min(AT_SIZE, max(args.sizes)))
    return [
        measured(args, precision, "--tokens", size, "--budget", str(budget)) | {"part": "budget"}
        for budget in args.budgets
    ]


def long_of(args: argparse.Namespace, precision: str) -> list[Row]:
    words = ("--long", str(args.long))
    ways = ((), ("--checkpointing",)) if args.long else ()
    return [measured(args, precision, *words, *way) | {"part": "long"} for way in ways]


def spread(values: list[float]) -> float:
    """How far the largest is above the smallest, as a share."""
    return max(values) / min(values) - 1


def listed(rows: list[Row], *names: str) -> str:
    return table([HEADS.get(name, name) for name in names], [[row[name] for name in names] for row in rows])


def flatness(rows: list[Row]) -> str:
    """In a sentence how much cost and memory move over the sizes of one precision."""
    times = rows[-1]["tokens"] / rows[0]["tokens"]
    cost = spread([row["cpu_ms_per_token"] for row in rows])
    peak = spread([row["peak_rss_mb"] for row in rows])
    return (
        f"`{rows[0]['precision']}`, {times:.0f} times the tokens: the dearest size costs {100 * cost:.1f} % "
        f"more per token than the cheapest, the largest peak is {100 * peak:.1f} % above the smallest."
    )


def text_of(rows: list[Row], precisions: list[str]) -> str:
    parts = {part: [row for row in rows if row["part"] == part] for part in ("size", "budget", "long")}
    sizes = parts["size"]
    what = ("tokens", "rows", "micro_batches", "cpu_seconds", "cpu_ms_per_token", "peak_rss_mb")
    text = [
        f"One update, actor and critic, forward and backward, in micro-batches of at most {BUDGET} tokens "
        "(a prompt that answers share counts once), on one thread.",
        listed(sizes, "precision", *what),
        *(flatness([row for row in sizes if row["precision"] == precision]) for precision in precisions),
    ]
    if parts["budget"]:
        text += ["Larger budgets, which is what memory grows with:"]
        text += [listed(parts["budget"], "precision", "budget", *what)]
    if parts["long"]:
        fits = sum(row["peak_rss_mb"] <= ROOM_MB for row in parts["long"])
        text += [
            "One answer trained on alone, with both optimizer steps, gradient checkpointing off and on: "
            f"{fits} of {len(parts['long'])} peaks are within 12 GB.",
            listed(parts["long"], "precision", "checkpointing", "tokens", "cpu_seconds", "peak_rss_mb"),
        ]
    return "\n\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens")
    parser.add_argument("--budgets", type=int, nargs="*", default=list(MORE_BUDGETS), help="beside the usual")
    parser.add_argument("--precision", nargs="+", choices=["exact", "fast"], default=["exact", "fast"])
    parser.add_argument("--long", type=int, default=8000, help="tokens of the long answer; 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of the sizes up to 8,192 tokens")
    parser.add_argument("--name", default="growth", help="of the files in results/")
    args = parser.parse_args()
    rows = [row for part in (sizes_of, budgets_of, long_of) for p in args.precision for row in part(args, p)]
    settings = {"sizes": args.sizes, "budget": BUDGET, "long": args.long, "rounds": args.rounds}
    text = text_of(rows, args.precision)
    write(args.name, settings, rows, text)
    print(text)


if __name__ == "__main__":
    main()
