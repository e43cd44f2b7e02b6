"""Twelve kinds of stored data with a known answer: is the audit's verdict right, and does following it pay?

    python benchmarks/verdicts.py --seed 0 --out runs/verdicts    # verdicts and training, 5 worlds
    python benchmarks/verdicts.py --seed 7 --no-training          # verdicts alone, other parameters

Parameters of each kind come from the seed. A world is the demo's task with a start policy of its own; each
kind's rows are audited, then trained on twice: by the default and by `algorithm.method=auto`, which obeys the
verdict ("don't train" scores as the start policy). Scores are of 500 test problems, greedy, by the truth,
paired by problem over the worlds. Runs that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write
from verdict_data import KINDS, World

from rein.audit.whole import audit
from rein.commands.demo import recipe_of
from rein.config.recipe import Recipe
from rein.data import addition
from rein.data.loader import load_prompts
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.data.tokenize import Encoder
from rein.functional.statistics import paired_bootstrap
from rein.models.actor import load_actor
from rein.models.tiny import make_tiny
from rein.stages import pipeline
from rein.tracking.console import Console

PROMPTS = 160
EARLIER = 100  # SFT steps of the earlier state; the start policy has 300
TRAINING = [
    "stages=[train,evaluate]",
    "data.train_batch_size=256",
    "trainer.critic_warmup=40",
    "evaluate.pass_k=0",
    "trainer.val_prompts=100",
    "trainer.test_freq=3",
]
FEW = [  # of a handful of rows
    *(word for word in TRAINING if not word.startswith("data.train_batch_size")),
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
]
Words = Sequence[str]


class Right(NamedTuple):
    """What a verdict must say: its decision, one of these findings, and no other fault than those."""

    decision: str
    one_of: frozenset[str]


FAULTLESS = frozenset({"reproduced", "near", "stale"})
RIGHT: dict[str, Right] = {
    "fresh": Right("train", frozenset({"reproduced"})),
    "stale": Right("train", frozenset({"stale", "near"})),
    "wrong model": Right("limits", frozenset({"wrong model"})),
    "wrong temperature": Right("limits", frozenset({"wrong temperature"})),
    "top-p cut": Right("limits", frozenset({"top-p cut"})),
    "reward noise": Right("train", frozenset({"reward noise"})),
    "length-biased reward": Right("train", frozenset({"length"})),
    "duplicated": Right("limits", frozenset({"duplicated"})),
    "leaked": Right("limits", frozenset({"leaked"})),
    "no spread": Right("stop", frozenset({"no spread"})),
    "too few": Right("stop", frozenset({"too few"})),
    "good": Right("train", frozenset({"near", "stale", "reproduced"})),
}


def is_right(kind: str, verdict: dict[str, Any]) -> bool:
    findings = {reason["finding"] for reason in verdict["reasons"]}
    wanted = RIGHT[kind]
    alone = findings <= wanted.one_of | FAULTLESS
    return bool(verdict["decision"] == wanted.decision and findings & wanted.one_of and alone)


def words_of(base: Path, number: int) -> list[str]:
    data = base / "data"
    return [
        f"seed={number}",
        f"model.path={base}/start/sft/model",
        f"data.val_files={data}/dev.parquet",
        f"evaluate.files={data}/test.parquet",
        f"sft.files={data}/demonstrations.parquet",
    ]


def made(words: Words) -> Recipe:
    return recipe_of(list(words))[0]


def world(base: Path, number: int, console: Console) -> World:
    """The demo's data, a start policy, and the same after fewer steps of SFT."""
    addition.write(base / "data", number)
    make_tiny(base / "base", seed=number) if not (base / "base").exists() else None
    for name, own in (("start", []), ("earlier", [f"sft.total_steps={EARLIER}"])):
        words = [w for w in words_of(base, number) if not w.startswith("model.path")]
        words += [f"out={base}/{name}", f"model.path={base}/base", "stages=[sft]", *own]
        pipeline.run(made(words), console)
    actor = load_actor(f"{base}/start/sft/model")
    recipe = made([f"out={base}", *words_of(base, number)])
    encoder = encoder_of(actor)
    prompts, test = (
        load_prompts(f"{base}/data/{name}.parquet", encoder, recipe.data).rows for name in ("prompts", "test")
    )
    earlier = load_actor(f"{base}/earlier/sft/model")
    return World(actor, earlier, prompts[:PROMPTS], test, encoder.decode_response)


def encoder_of(actor: Any) -> Encoder:
    return Encoder(
        actor.tokenizer,
        apply_chat_template=None,
        stop_ids=set(actor.stop_ids),
        vocab_size=actor.vocabulary,
    )


def one_kind(
    base: Path, number: int, kind: str, seed: int, found: World, console: Console, train: bool
) -> Any:
    """The verdict on one kind's rows of one world, and what both ways of training score on each problem."""
    folder = base / f"{kind.replace(' ', '_')}-{seed}"
    done = folder / "result.json"
    if done.exists():
        kept = json.loads(done.read_text())
        if kept["trained"] or not train:
            return kept
    rows, drawn = KINDS[kind](found, random.Random(f"{seed} {number} {kind}"))
    file = folder / "rows.parquet"
    write_rows(file, [trajectory_row(row) for row in rows], TRAJECTORIES)
    words = [*words_of(base, number), *(TRAINING if len(rows) > 512 else FEW), f"data.train_files={file}"]
    recipe = made([f"out={folder}/default", *words])
    verdict = audit(recipe, [str(file)], found.actor, encoder_of(found.actor)).verdict.as_json()
    verdict = json.loads(json.dumps(verdict).replace(f"{base.parent}/", ""))  # of any machine
    result: dict[str, Any] = {
        "world": number,
        "kind": kind,
        "drawn": drawn,
        "verdict": verdict,
        "right": is_right(kind, verdict),
        "trained": train,
    }
    if train:
        result |= trained(folder, words, verdict, console)
    done.write_text(json.dumps(result))
    return result


def trained(folder: Path, words: Words, verdict: dict[str, Any], console: Console) -> dict[str, Any]:
    """Nothing where the verdict changes nothing: the two are the same run."""
    if verdict["decision"] != "stop" and not verdict["settings"] and verdict["method"] == "ppo":
        return {}
    before, default = scores(folder / "default", words, console)
    followed = before
    if verdict["decision"] != "stop":
        followed = scores(folder / "auto", [*words, "algorithm.method=auto"], console)[1]
    return {"start": before, "default": default, "auto": followed}


def scores(out: Path, words: Words, console: Console) -> tuple[list[float], list[float]]:
    """Of each test problem, before and after."""
    pipeline.run(made([f"out={out}", *words]), console)
    answers = pq.read_table(out / "evaluate" / "answers.parquet").to_pydict()
    return [float(s) for s in answers["before_score"]], [float(s) for s in answers["after_score"]]


def gap(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Mean of auto - default, and its interval when problems are drawn: a problem's score is its mean."""
    auto, default = (
        torch.tensor(np.mean([row[name] for row in rows], axis=0)) for name in ("auto", "default")
    )
    interval = paired_bootstrap(default, auto)
    return (auto - default).mean().item(), interval.low, interval.high


def report(results: Sequence[dict[str, Any]], seed: int, worlds: int) -> None:
    body = []
    for kind in KINDS:
        own = [row for row in results if row["kind"] == kind]
        said = sorted({reason["finding"] for row in own for reason in row["verdict"]["reasons"]})
        cells = [kind, f"{sum(row['right'] for row in own)} of {len(own)}", ", ".join(said)]
        if own and all("auto" in row for row in own):
            means = [f"{np.mean([row[name] for row in own]):.3f}" for name in ("start", "default", "auto")]
            difference, low, high = gap(own)
            cells += [*means, f"{difference:+.3f} ({low:+.3f} to {high:+.3f})"]
        body.append(cells)
    whole = [row for row in results if "auto" in row]
    text = [(__doc__ or "").split("\n\n")[2]]
    head = ["data", "verdict right", "findings", "start", "default", "auto", "auto - default (95 %)"]
    text.append(table(head, [cells + [""] * (len(head) - len(cells)) for cells in body]))
    if whole:
        difference, low, high = gap(whole)
        said = f"Where they differ: auto - default {difference:+.3f} ({low:+.3f} to {high:+.3f})"
        text.append(f"{said}, over {len(whole)} runs; elsewhere the verdict changes nothing.")
    kept = [{k: v for k, v in row.items() if k not in ("start", "default", "auto")} for row in results]
    write("verdicts", {"seed": seed, "worlds": worlds, "training": TRAINING}, kept, "\n\n".join(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of the kinds' parameters")
    parser.add_argument("--worlds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/verdicts"))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--no-report", action="store_true")
    arguments = parser.parse_args()
    console, results = Console(), []
    for number in arguments.worlds:
        base = arguments.out / f"world{number}"
        found = world(base, number, console)
        for kind in arguments.kinds:
            train = not arguments.no_training
            results.append(one_kind(base, number, kind, arguments.seed, found, console, train))
            row = results[-1]
            said = [reason["finding"] for reason in row["verdict"]["reasons"]]
            means = {
                name: round(float(np.mean(row[name])), 3)
                for name in ("start", "default", "auto")
                if name in row
            }
            print(number, kind, row["drawn"], "right" if row["right"] else "WRONG", said, means, flush=True)
    if not arguments.no_report:
        report(results, arguments.seed, len(arguments.worlds))


if __name__ == "__main__":
    main()
