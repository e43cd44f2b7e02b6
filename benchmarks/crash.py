"""Whether a run that is killed with SIGKILL, at any moment, ends as the run that was not.

Small jobs of seven kinds: training (plain, LoRA, killed twice in one epoch, killed while the critic is
fitted, with rollbacks), SFT and a reward model. Each is a process of its own, killed at a moment drawn from a
seed, in every second run while it saves a snapshot, and started again with the same words until it is done.
Weights must be bit-equal to those of the unbroken run, metrics.jsonl and what stands in journal.jsonl equal
but for the times. Most processes are forks of one that has imported torch; every ninth run starts Python
anew. Usage: python benchmarks/crash.py (`make crash`)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import results_io
import torch
from crash_jobs import EPOCHS, FIT, JOBS, Job, Stop
from safetensors.torch import load_file

from rein import journal
from rein.data import addition
from rein.journal import standing
from rein.models.tiny import make_tiny
from rein.stages import pipeline, reward_model, score, sft, train  # noqa: F401  forks need not import them
from rein.tracking.jsonl import read_metrics, untimed

KINDS = {  # name: the job, its share of the runs
    "training": ("plain", 9),
    "training, LoRA": ("lora", 7),
    "training, twice in one epoch": ("plain", 7),
    "training, critic fit": ("plain", 7),
    "training, with rollbacks": ("rollback", 8),
    "SFT": ("sft", 6),
    "reward model": ("reward", 6),
}
UPDATE_SECONDS, SAVE_SECONDS = 0.03, 0.004  # a kill comes so much later, at most
RESUMED = r"resume: .*?from (?:update|step) (\d+)"
TRIES = 20  # moments drawn for a kill until all come before the end
WORKERS = 2


def stops(kind: str, draw: random.Random, in_save: bool, whole: dict[str, Any]) -> Iterator[Stop]:
    """Where a run of this kind is ended, one after the other."""
    last, fit = whole["updates"], FIT if whole["verb"] == "train" else 0
    later = draw.uniform(0, SAVE_SECONDS if in_save else UPDATE_SECONDS)
    if kind == "training, critic fit":
        first = draw.randrange(1, fit - 1)
        if in_save:
            yield Stop(first, later, in_save=True, gently=True)
        elif draw.random() < 0.5:
            yield Stop(first, later)
        else:
            yield Stop(first, gently=True)
            yield Stop(draw.randrange(first + 1, fit), later)
    elif kind == "training, twice in one epoch":
        length = (last - fit) // EPOCHS
        begin = fit + length * draw.randrange(EPOCHS)
        first, second = sorted(begin + draw.randrange(length) for _ in range(2))
        yield Stop(first, draw.uniform(0, UPDATE_SECONDS))
        yield Stop(second, later, in_save=in_save)
    elif in_save or draw.random() < 0.6:
        yield Stop(draw.randrange(fit, last), later, in_save=in_save)
    else:  # at any second, of its start too
        yield Stop(seconds=draw.uniform(0, whole["seconds"]))


def one_run(number: int, kind: str, base: Path, seed: int, whole: dict[str, Any]) -> dict[str, Any]:
    """Ended, started again, held against the unbroken run."""
    name, in_save, anew = KINDS[kind][0], number % 2 == 1, number % 9 == 4
    job = Job(name, base, base / "runs" / f"{number:02}", anew)
    draw = random.Random(f"{seed} {number}")
    ends: list[dict[str, Any] | None] = [None]
    tries = 0
    while None in ends and tries < TRIES:
        shutil.rmtree(job.out, ignore_errors=True)
        job.log.unlink(missing_ok=True)
        ends, tries = [], tries + 1
        for stop in stops(kind, draw, in_save, whole):
            ends.append(job.ended(stop))
            if ends[-1] is None:
                break
    job.finish()
    row = {"run": number, "kind": kind, "new_python": anew, "tries": tries, "ends": ends}
    row["resumed_from"] = [int(found) for found in re.findall(RESUMED, job.log.read_text())]
    row["differs"] = differences(job.stage, base / "unbroken" / name / job.verb) + odd(job)
    row["equal"] = not row["differs"]
    print(json.dumps(row), flush=True)
    return row


def differences(stage: Path, unbroken: Path) -> list[str]:
    """The files of one folder that are not as in the other."""
    found = []
    models = sorted(path.relative_to(unbroken) for path in unbroken.glob("*/*.safetensors"))
    assert models, unbroken
    for model in models:
        one, other = (load_file(folder / model) for folder in (stage, unbroken))
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            found.append(str(model))
    one, other = (untimed(read_metrics(folder / "metrics.jsonl")) for folder in (stage, unbroken))
    found += ["metrics.jsonl"] if one != other else []
    events, others = (
        [line | {"time": 0, "seq": 0} for line in standing(journal.read(folder / "journal.jsonl"))]
        for folder in (stage, unbroken)
    )
    return found + (["journal.jsonl"] if events != others else [])


def odd(job: Job) -> list[str]:
    """What no kill may leave: a broken snapshot under a whole one's name, drafts in the finished folder."""
    broken = ["a broken snapshot"] * ("passed over" in job.log.read_text())
    return broken + sorted(str(path.relative_to(job.out)) for path in job.out.rglob(".*"))


def prepare(base: Path) -> dict[str, dict[str, Any]]:
    """Data, a start policy, scored rows; and of each job an unbroken run: its updates and seconds."""
    addition.write(base / "data", 0, demonstrations=160, prompts=48, dev=8, test=1, pairs=160)
    model = make_tiny(base / "tiny", seed=0, hidden=64, layers=2)
    job = Job("plain", base, base / "prepared")
    job.words = ["run", *job.words[1:], "stages=[sft,rollout,score]", "sft.total_steps=20"]
    job.words += [f"rollout.files={base}/data/prompts.parquet", "rollout.n=4", "data.train_files=[]"]
    own = (f"model.path={model}", "sft.share=0", "sft.optim.lr=1e-3")
    job.words = list({word.partition("=")[0]: word for word in (*job.words, *own)}.values())
    job.finish()
    found = {}
    for name, (verb, _) in JOBS.items():
        job = Job(name, base, base / "unbroken" / name)
        seconds = job.finish()
        updates = read_metrics(job.stage / "metrics.jsonl")[-1]["number"]
        found[name] = {"verb": verb, "updates": updates, "seconds": round(seconds, 2)}
        events = standing(journal.read(job.stage / "journal.jsonl"))
        found[name]["rollbacks"] = sum(event["kind"] == "rollback" for event in events)
    assert found["rollback"]["rollbacks"], "the job that rolls back does not"
    return found


def planned(runs: int) -> list[str]:
    """The kind of each run, in their shares, mixed."""
    total = sum(share for _, share in KINDS.values())
    order = [kind for kind, (_, share) in KINDS.items() for _ in range(share)]
    return [order[i * total // runs % total] for i in range(runs)]


def report(rows: Sequence[dict[str, Any]], unbroken: dict[str, Any], seed: int, seconds: float) -> str:
    body = []
    for kind in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        own = [row for row in rows if kind in (row["kind"], "all")]
        kills = [end for row in own for end in row["ends"] if end["signal"] == "SIGKILL"]
        in_save = sum(end["in_save"] for end in kills)
        resumes = sum(len(row["ends"]) for row in own)
        equal = f"{sum(row['equal'] for row in own)} of {len(own)}"
        body.append([kind, len(own), len(kills), in_save, resumes, equal])
    head = ["job", "runs", "kills", "kills during a save", "resumes", "equal"]
    text = [(__doc__ or "").partition(" Usage")[0].split("\n\n")[1], results_io.table(head, body)]
    text.append(f"{seconds:.0f} s with {WORKERS} runs at a time.")
    settings = {"seed": seed, "seconds": round(seconds), "unbroken": unbroken}
    results_io.write("crash", settings, rows, "\n\n".join(text))
    return text[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rein-crash-") as folder:
        base = Path(folder)
        unbroken = prepare(base)
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(WORKERS, mp_context=fork) as pool:
            waiting = [
                pool.submit(one_run, i, kind, base, arguments.seed, unbroken[KINDS[kind][0]])
                for i, kind in enumerate(planned(arguments.runs))
            ]
            rows = [run.result() for run in waiting]
    seconds = time.monotonic() - started
    print(f"unbroken: {unbroken}; {seconds:.0f} s")
    if not arguments.no_report:
        print(report(rows, unbroken, arguments.seed, seconds))
    if not all(row["equal"] for row in rows):
        raise SystemExit("crash: some runs differ from the unbroken one")


if __name__ == "__main__":
    main()
