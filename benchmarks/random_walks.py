"""Every method on the same stored walks on random graphs, after trlX's randomwalks; exact, paired by graph.

    python benchmarks/random_walks.py --out runs/walks                  # all, then the report
    python benchmarks/random_walks.py --out runs/walks --only tune      # in parts: tune, then short and long,
    python benchmarks/random_walks.py --out runs/walks --only short --graphs 10 11 12     # in two processes
    python benchmarks/random_walks.py --out runs/walks --only report

A GPT of 2 layers and width 64 is taught 1,000 walks that a uniform policy made on a graph of 21 nodes, then
trained on these walks alone: nothing is generated. One learning rate is chosen for each method, of three
that all methods share, by the mean final score on the tuning graphs; the fresh graphs are then trained once
at that rate. The long task, 300 walks of 100 moves, has a tuning graph of its own. "Final" is the score at
the end of the run, "best" the best that was measured in it. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import svg
from results_io import RESULTS, table, write
from walks_run import (
    DEFAULT,
    LONG,
    METHODS,
    RATES,
    SHORT,
    Runs,
    Stored,
    Task,
    interval,
    logged_walks,
    mean,
)

NAME = "random_walks"
TUNING = {"short": (0, 1), "long": (0,)}
FRESH = {"short": tuple(range(10, 20)), "long": (20, 21, 22)}
TASKS = {"short": SHORT, "long": LONG}
ABLATION = {  # (correction, KL)
    (False, False): "PPO ignoring it, without KL",
    (False, True): "PPO ignoring it",
    (True, False): "decoupled PPO without KL",
    (True, True): DEFAULT,
}
Rows = dict[str, list[dict[str, Any]]]  # by method, in the order of the graphs


def opened(task: Task, seed: int, out: Path) -> tuple[Stored, Runs]:
    data = logged_walks(task, seed, out)
    runs = Runs(data.folder)
    begun = {"logged": data.logged, **data.begun}
    (data.folder / "begun.json").write_text(json.dumps(begun))
    print(
        f"{data.folder.name}: " + " ".join(f"{key} {value:.3f}" for key, value in begun.items()), flush=True
    )
    return data, runs


def tune(task: Task, out: Path, methods: Sequence[str]) -> None:
    for seed in TUNING[task.name]:
        data, runs = opened(task, seed, out)
        for method in methods:
            for rate in RATES:
                if runs.run(data, method, rate) is None:
                    break


def chosen(task: Task, out: Path) -> dict[str, float]:
    """The rate with the best mean final score on the tuning graphs, of each method that was run there."""
    runs = [Runs(out / f"{task.name}{seed}") for seed in TUNING[task.name]]
    found = {}
    for method in METHODS:
        scores = {}
        for rate in RATES:
            own = [row["final"] for each in runs if (row := each.find(method, rate)) is not None]
            if len(own) == len(runs):
                scores[rate] = mean(own)
        if len(scores) == len(RATES):
            found[method] = max(scores, key=lambda rate: scores[rate])
    return found


def fresh(task: Task, out: Path, seeds: Sequence[int], methods: Sequence[str]) -> None:
    rates = chosen(task, out)
    for method in methods:
        if method not in rates:
            print(f"{task.name} {method}: left out, not tuned (refused there, or run --only tune first)")
    for seed in seeds:
        data, runs = opened(task, seed, out)
        for method in methods:
            if method in rates:
                runs.run(data, method, rates[method])


def collect(task: Task, out: Path) -> tuple[Rows, list[dict[str, Any]]]:
    """Each method's runs on all fresh graphs (those that lack one are left out), and how each graph began."""
    seeds, rates = FRESH[task.name], chosen(task, out)
    runs = {seed: Runs(out / f"{task.name}{seed}") for seed in seeds}
    rows: Rows = {}
    for method, rate in rates.items():
        own = [row for seed in seeds if (row := runs[seed].find(method, rate)) is not None]
        if len(own) == len(seeds):
            rows[method] = [row | {"graph": seed} for row, seed in zip(own, seeds, strict=True)]
    begun = [
        json.loads(file.read_text())
        for seed in seeds
        if (file := out / f"{task.name}{seed}/begun.json").exists()
    ]
    return rows, begun


def difference(rows: Rows, ours: str, other: str) -> dict[str, Any]:
    """Final scores, ours minus the other's, paired by graph."""
    gaps = [a["final"] - b["final"] for a, b in zip(rows[ours], rows[other], strict=True)]
    low, high = interval(gaps)
    noise = low <= 0 <= high
    return {"ours": ours, "other": other, "difference": mean(gaps), "ci95": [low, high], "noise": noise}


def said(found: dict[str, Any]) -> str:
    low, high = found["ci95"]
    words = f"{found['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
    return words if found["noise"] else f"**{words}**"


def method_table(rows: Rows, begun: list[dict[str, Any]]) -> str:
    head = ["", "rate", "final (95 %)", "best", "leaves the graph", "ESS", "mean weight", "default - this"]
    logged, start = mean([each["logged"] for each in begun]), mean([each["val/score"] for each in begun])
    left = mean([each["val/invalid"] for each in begun])
    body: list[list[str]] = [
        ["stored walks", "", f"{logged:.3f}", "", "0", "1", "1", ""],
        ["start policy", "", f"{start:.3f}", "", f"{left:.3f}", *weights_of(begun), ""],
    ]
    for method, own in rows.items():
        finals = [row["final"] for row in own]
        low, high = interval(finals)
        cells = [f"{mean([row[key] for row in own]):.3f}" for key in ("best", "invalid")]
        gap = said(difference(rows, DEFAULT, method)) if method != DEFAULT and DEFAULT in rows else ""
        final = f"{mean(finals):.3f} ({low:.3f} to {high:.3f})"
        body.append([method, f"{own[0]['rate']:g}", final, *cells, *weights_of(own), gap])
    return table(head, body)


def weights_of(rows: list[dict[str, Any]]) -> list[str]:
    """Raw ESS and mean raw weight, medians over graphs: a mean would be that of one graph."""
    return [f"{median([row[key] for row in rows]):.3g}" for key in ("ess", "mean_weight")]


def ablation(rows: Rows) -> str:
    """What the KL adds and what the correction adds, each with and without the other."""
    if not all(name in rows for name in ABLATION.values()):
        return ""
    lines = []
    for what, pairs in {
        "KL": (((True, True), (True, False)), ((False, True), (False, False))),
        "correction": (((True, True), (False, True)), ((True, False), (False, False))),
    }.items():
        beside = "correction" if what == "KL" else "KL"
        parts = [said(difference(rows, ABLATION[a], ABLATION[b])) for a, b in pairs]
        lines.append(f"- {what} adds {parts[0]} with the {beside}, {parts[1]} without it")
    return "Shares, as differences of final scores:\n\n" + "\n".join(lines)


def figure(rows: Rows, begun: list[dict[str, Any]]) -> None:
    """Final scores on the short task with intervals; best of the run hollow; the stored walks as a line."""
    height = 26 * len(rows)
    panel = svg.Panel(
        (250, 34, 420, height), (0, 1), (-0.5, len(rows) - 0.5), "score on fresh graphs, mean of 10"
    )
    panel.x_ticks([(x / 5, f"{x / 5:g}") for x in range(6)])
    logged = mean([each["logged"] for each in begun])
    panel.line([(logged, -0.5), (logged, len(rows) - 0.5)], "#999", dots=False)
    panel.text("stored walks", panel.x(logged) + 4, 34 + height - 6, color="#777")
    for i, (method, own) in enumerate(reversed(rows.items())):
        finals = [row["final"] for row in own]
        low, high = interval(finals)
        color = svg.COLORS[1] if method == DEFAULT else svg.COLORS[0]
        panel.line([(max(low, 0), i), (min(high, 1), i)], color, dots=False, wide=2)
        panel.dot(mean([row["best"] for row in own]), i, color, hollow=True)
        panel.dot(mean(finals), i, color)
        panel.text(method, 242, panel.y(i) + 4, anchor="end", color=color)
    panel.text(
        "filled: final, with its 95 % interval; hollow: best of the run", 250, height + 70, color="#777"
    )
    svg.write(RESULTS / f"{NAME}.svg", (700, height + 84), [panel])


def report(out: Path) -> None:
    """results/random_walks.{json,md,svg} from what is done in `out`."""
    text, kept, settings = [(__doc__ or "").split("\n\n")[2]], list[dict[str, Any]](), dict[str, Any]()
    for name, task in TASKS.items():
        rows, begun = collect(task, out)
        if not rows or len(begun) < len(FRESH[name]):
            print(f"{name}: nothing to report, some graphs are missing")
            continue
        lacking = [method for method in METHODS if method not in rows]
        title = f"## {name.capitalize()} task: {task.walks} walks, {len(FRESH[name])} fresh graphs"
        text += [title, method_table(rows, begun), ablation(rows)]
        if lacking:
            text.append(f"Not run (refused by this version, or not done): {', '.join(lacking)}.")
        if len(FRESH[name]) < 5:
            finals = [[m, *[f"{row['final']:.3f}" for row in own]] for m, own in rows.items()]
            text.append(table(["final", *[f"graph {seed}" for seed in FRESH[name]]], finals))
        compared = [difference(rows, DEFAULT, m) for m in rows if m != DEFAULT and DEFAULT in rows]
        cpu = sum(row["seconds"] for own in rows.values() for row in own)
        settings[name] = {"rates": chosen(task, out), "comparisons": compared, "cpu_seconds": round(cpu)}
        settings[name] |= {"sizes": task.__dict__, "tuning": TUNING[name], "fresh": FRESH[name]}
        kept += [row | {"task": name} for own in rows.values() for row in own]
        if name == "short":
            figure(rows, begun)
            text.insert(1, f"![scores]({NAME}.svg)")
    if kept:
        text.append(
            "Bold: more than noise, Student's 95 % interval over graphs leaves out 0. Leaves the graph: "
            "the chance that a walk makes an invalid move. Weights are raw, of whole stored walks, policy / "
            "logged; of their mean and ESS, the median over graphs."
        )
        write(NAME, {"methods": METHODS, "grid": RATES, **settings}, kept, "\n\n".join(filter(None, text)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/walks"))
    parser.add_argument("--only", choices=["tune", "short", "long", "report"])
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="for --only tune"
    )
    parser.add_argument(
        "--graphs", type=int, nargs="+", help="some of the fresh graphs, for --only short or long"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started, only = time.monotonic(), arguments.only
    if only in (None, "tune"):
        for name in arguments.tasks:
            tune(TASKS[name], arguments.out, arguments.methods)
    for name, task in TASKS.items():
        if only in (None, name):
            fresh(task, arguments.out, arguments.graphs or FRESH[name], arguments.methods)
    if only in (None, "report"):
        report(arguments.out)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
