"""How each method stands data that are k optimizer steps old: the short task of random_walks, k up to 256.

    python benchmarks/staleness.py --out runs/stale                     # all, then the report
    python benchmarks/staleness.py --out runs/stale --graphs 30 --no-report    # in parts, in two processes

An actor improves by on-policy PPO, one optimizer step for each 125 fresh walks. What it is after 256 steps is
everyone's start policy; the 1,000 stored walks come from what it was k steps before. Each method trains on
them alone, 64 updates at the rate that random_walks.py chose for it. ESS (of whole walks) and
KL(start || behavior), nats per move, are those of the start policy on the stored walks: how stale they are
before anything is trained. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import svg
from results_io import RESULTS, table, write
from walks import Mover, sample
from walks_run import (
    DEFAULT,
    METHODS,
    QUIET,
    RATES,
    Runs,
    Stored,
    Task,
    interval,
    logged_walks,
    mean,
    recipe_of,
    schedule,
    stored,
)

from rein.models.actor import load_actor
from rein.stages.train_open import open_job

NAME = "staleness"
AGES = (0, 1, 4, 16, 64, 256)
GRAPHS = (30, 31, 32)
STEPS = 256
TASK = Task("stale", False, 1000, 125, 64, sft_batch=125, sft_steps=150, fit_steps=100, measured=2)
AUTO = "auto"
COMPARED = (
    "filtered cloning (top 25 %)",
    "DPO",
    "PPO anchored to the logged policy",
    "PPO ignoring it",
    DEFAULT,
    AUTO,
    "decoupled PPO without KL",
    "TOPR",
    "AWR",
    "V-trace",
)
METHODS[AUTO] = ["algorithm.method=auto"]  # what the audit of the rows says, at the default's rate
IMPROVING = ["actor.use_kl_loss=false", "actor.optim.lr=2e-5"]
Found = dict[tuple[int, int], tuple[dict[str, float], Runs]]  # graph, age -> how stale, and the runs


def improve(data: Stored) -> Path:
    """Snapshots step-N of an actor that learns from its own fresh walks, N = STEPS - age."""
    folder = data.folder / "improving"
    wanted = {STEPS - age for age in AGES}
    if (folder / f"step-{STEPS}" / "config.json").exists():
        return folder
    begin = [f"critic.model.path={data.critic}", "trainer.critic_warmup=0"]
    words = [*schedule(TASK, data.folder, len(data.rows)), *begin, *IMPROVING]
    job = open_job(recipe_of(folder / "run", data.start, words), QUIET)
    for step in range(STEPS + 1):
        if step in wanted:
            job.actor.save(folder / f"step-{step}")
        rows, _ = sample(Mover(job.actor.model), data.graph, TASK.mini, seed=step)
        experience = job.maker.make(rows, 0.0)
        for update in job.learner.updates(len(rows), step):
            job.learner.backward(update, experience)
            job.learner.apply(update.role)
    job.close()
    shutil.rmtree(folder / "run")
    return folder


def aged(data: Stored, snapshots: Path, age: int) -> Stored:
    """Walks of the actor `age` steps before the start policy, and the critic fitted to them."""
    writer = load_actor(str(snapshots / f"step-{STEPS - age}"))
    rows, _ = sample(Mover(writer.model), data.graph, TASK.walks, seed=1000 + age, version=STEPS - age)
    folder = data.folder.with_name(f"{data.folder.name}-{age}")
    return stored(TASK, data.graph, folder, rows, snapshots / f"step-{STEPS}")


def rates() -> dict[str, float]:
    """What random_walks.py chose on its tuning graphs; the middle of the grid for a method it did not run."""
    file = RESULTS / "random_walks.json"
    found = json.loads(file.read_text())["settings"]["short"]["rates"] if file.exists() else {}
    if DEFAULT in found:
        found[AUTO] = found[DEFAULT]
    lacking = [method for method in COMPARED if method not in found]
    if lacking:
        print(f"{file.name} has no rate for {', '.join(lacking)}: {RATES[1]:g} is taken")
    return {method: found.get(method, RATES[1]) for method in COMPARED}


def train_all(out: Path, graphs: Sequence[int], methods: Sequence[str]) -> None:
    chosen = rates()
    for seed in graphs:
        data = logged_walks(TASK, seed, out)
        snapshots = improve(data)
        for age in AGES:
            old = aged(data, snapshots, age)
            begun = {"logged": old.logged, **old.begun}
            (old.folder / "begun.json").write_text(json.dumps(begun))
            shown = " ".join(f"{key} {value:.3f}" for key, value in begun.items())
            print(f"{old.folder.name}: {shown}", flush=True)
            runs = Runs(old.folder)
            for method in methods:
                runs.run(old, method, chosen[method])


def collect(out: Path) -> Found:
    found: Found = {}
    for seed in GRAPHS:
        for age in AGES:
            folder = out / f"{TASK.name}{seed}-{age}"
            if (folder / "begun.json").exists():
                found[seed, age] = json.loads((folder / "begun.json").read_text()), Runs(folder)
    return found


def finals(found: Found, method: str, age: int, rate: float) -> list[float]:
    """Final scores over the graphs; empty where one is missing."""
    rows = [found[seed, age][1].find(method, rate) for seed in GRAPHS]
    own = [row["final"] for row in rows if row is not None]
    return own if len(own) == len(GRAPHS) else []


def report(out: Path) -> None:
    """results/staleness.{json,md,svg} from what is done in `out`."""
    found, chosen = collect(out), rates()
    if len(found) < len(GRAPHS) * len(AGES):
        print("nothing to report: some graphs are missing")
        return
    curves = {
        method: values
        for method in COMPARED
        if all(values := [finals(found, method, age, chosen[method]) for age in AGES])
    }
    begun = {
        name: [mean([found[seed, age][0][key] for seed in GRAPHS]) for age in AGES]
        for name, key in {
            "stored walks": "logged",
            "start policy": "val/score",
            "ESS": "ess",
            "KL from start to behavior": "kl_behavior",
            "mean raw weight": "mean_weight",
        }.items()
    }
    body = [[name, *[f"{value:.3f}" for value in values]] for name, values in begun.items()]
    gaps = []
    for method, curve in curves.items():
        name = f"**{method}**" if method == DEFAULT else method
        body.append([name, *[f"{mean(values):.3f}" for values in curve]])
        if method != DEFAULT and DEFAULT in curves:
            pairs = zip(curves[DEFAULT], curve, strict=True)
            each = [[a - b for a, b in zip(ours, theirs, strict=True)] for ours, theirs in pairs]
            over = [mean(by_graph) for by_graph in zip(*each, strict=True)]
            low, high = interval(over)
            gaps.append({"other": method, "difference": mean(over), "ci95": [low, high]})
    lacking = [method for method in COMPARED if method not in curves]
    lines = [
        f"- {DEFAULT} minus {gap['other']}, mean over k: {gap['difference']:+.3f} "
        f"({gap['ci95'][0]:+.3f} to {gap['ci95'][1]:+.3f})"
        for gap in gaps
    ]
    text = [
        (__doc__ or "").split("\n\n")[2],
        f"![final score by age of the data]({NAME}.svg)",
        f"Final scores, mean of {len(GRAPHS)} graphs, by the age of the data:",
        table(["k", *map(str, AGES)], body),
        "\n".join(lines),
    ]
    if lacking:
        text.append(f"Not run (refused by this version, or not done): {', '.join(lacking)}.")
    rows = [
        row | {"graph": seed, "age": age} for (seed, age), (_, runs) in found.items() for row in runs.rows
    ]
    settings = {"ages": AGES, "graphs": GRAPHS, "rates": chosen, "improving": IMPROVING, "begun": begun}
    settings |= {"methods": {name: METHODS[name] for name in COMPARED}, "gaps": gaps, "sizes": TASK.__dict__}
    write(NAME, settings, rows, "\n\n".join(filter(None, text)))
    figure(curves, begun)


def figure(curves: dict[str, list[list[float]]], begun: dict[str, list[float]]) -> None:
    """Final score over k, a line a method; below, on the same axis, what the data are like."""
    places, ends = range(len(AGES)), (-0.3, len(AGES) - 0.7)
    ticks = [(i, str(age)) for i, age in enumerate(AGES)]
    means = {method: [mean(values) for values in curve] for method, curve in curves.items()}
    bottom = min(*begun["start policy"], *(score for curve in means.values() for score in curve)) - 0.03
    top = svg.Panel((60, 30, 460, 300), ends, (bottom, 1.01), "final score, by the age k of the data")
    top.x_ticks(ticks)
    top.y_ticks([(v / 20, f"{v / 20:.2f}") for v in range(21) if v / 20 > bottom])
    drawn = [("start policy", "#999", begun["start policy"])]
    drawn += [(name, color, curve) for color, (name, curve) in zip(svg.COLORS, means.items(), strict=False)]
    for i, (name, color, values) in enumerate(drawn):
        top.line(list(zip(places, values, strict=True)), color, wide=3 if name == DEFAULT else 1.5)
        top.text(f"● {name}", 532, 44 + 18 * i, color=color)
    panels = [top]
    for left, name in zip((60, 310, 560), ("ESS", "KL from start to behavior", "stored walks"), strict=True):
        high = 1.0 if name != "KL from start to behavior" else max(*begun[name], 0.01) * 1.1
        title = "score of the stored walks" if name == "stored walks" else name
        panel = svg.Panel((left, 390, 190, 110), ends, (0, high), title)
        panel.x_ticks(ticks)
        panel.y_ticks([(0, "0"), (high / 2, f"{high / 2:.2g}"), (high, f"{high:.2g}")])
        panel.line(list(zip(places, begun[name], strict=True)), "#111")
        panels.append(panel)
    svg.write(RESULTS / f"{NAME}.svg", (780, 530), panels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stale"))
    parser.add_argument("--graphs", type=int, nargs="*", default=GRAPHS, help="none: only the report")
    parser.add_argument("--methods", nargs="+", choices=COMPARED, default=COMPARED)
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    train_all(arguments.out, arguments.graphs, arguments.methods)
    if not arguments.no_report:
        report(arguments.out)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
