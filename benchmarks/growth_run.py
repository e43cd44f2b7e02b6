"""One measurement of `growth.py`, in a process of its own: one JSON line with CPU seconds and peak memory.

    python benchmarks/growth_run.py --model FOLDER --batch batch.npz --tokens 4096 --precision fast
    python benchmarks/growth_run.py --model FOLDER --batch batch.npz --long 8000 --checkpointing

A batch of any size is made of copies of three prompts with four answers each, those of `peers/make_batch.py`
whose lengths are on average nearest to the whole file's, so that all sizes have the same lengths. Each copy
has token ids of its own: it shares no prompt with another. One copy goes through before the clock starts.
`--long` is one answer of so many tokens to a prompt of 100, and both optimizer steps are part of what is
timed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from update_run import experience_of, learner_of, rows_of, update

from rein.data.batches import row_batches
from rein.learner import Learner
from rein.runtime.memory import keep_few_kernels, keep_freed_memory
from rein.types import Experience

GROUPS, LONG_PROMPT = 3, 100
ANSWERS = ("resp", "old_logp", "values", "adv", "ret")  # what is stored for each answer token
Batch = Mapping[str, np.ndarray]


def typical(batch: Batch) -> list[int]:
    """The groups whose prompt and answer tokens together are nearest to those of average ones."""
    groups = np.unique(batch["group"])
    sizes = np.array(
        [[batch[name][batch["group"] == group].sum() for name in ("plen", "rlen")] for group in groups]
    )
    some = list(combinations(range(len(groups)), min(GROUPS, len(groups))))
    distances = [np.abs(sizes[list(found)].mean(0) / sizes.mean(0) - 1).max() for found in some]
    return [int(groups[i]) for i in some[int(np.argmin(distances))]]


def copied(batch: Batch, copies: int, vocabulary: int) -> dict[str, np.ndarray]:
    """So many copies of the typical groups, the token ids of each moved by another number."""
    rows = np.flatnonzero(np.isin(batch["group"], typical(batch)))
    found: dict[str, np.ndarray] = {name: np.tile(batch[name][rows], copies) for name in ("plen", "rlen")}
    for name in ("prompt", *ANSWERS):
        ends = np.cumsum(batch["plen" if name == "prompt" else "rlen"])
        parts = np.split(batch[name], ends[:-1])
        once = np.concatenate([parts[row] for row in rows])
        found[name] = np.tile(once, copies)
        if name in ("prompt", "resp"):
            moves = np.arange(copies) * (vocabulary // copies)
            found[name] = (found[name] + np.repeat(moves, len(once))) % vocabulary
    return found


def one_row(length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """A prompt of 100 tokens and one long answer, all drawn."""
    draw = np.random.default_rng(7)
    found = {"plen": np.array([LONG_PROMPT]), "rlen": np.array([length])}
    found |= {"prompt": draw.integers(0, vocabulary, LONG_PROMPT)}
    found |= {name: draw.normal(0, 0.3, length).astype(np.float32) for name in ANSWERS}
    return found | {
        "resp": draw.integers(0, vocabulary, length),
        "old_logp": np.full(length, -11, np.float32),
    }


def opened(args: argparse.Namespace, batch: Batch) -> tuple[Learner, Experience]:
    rows = rows_of(batch, limit=0, n=None)
    what = {
        "precision": args.precision, "budget": args.budget, "checkpointing": args.checkpointing,
    }  # fmt: skip
    return learner_of(args.model, len(rows), what), experience_of(batch, rows)


def peak_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    keep_few_kernels()
    keep_freed_memory()
    vocabulary = int(json.loads((Path(args.model) / "config.json").read_text())["vocab_size"])
    stored: Batch = dict(np.load(args.batch))
    block = copied(stored, 1, vocabulary)
    copies = max(1, round(args.tokens / int(block["plen"].sum() + block["rlen"].sum())))
    batch = one_row(args.long, vocabulary) if args.long else copied(stored, copies, vocabulary)
    learner, experience = opened(args, batch)
    found: dict[str, Any] = {"precision": args.precision, "rss_before_mb": peak_mb()}
    if not args.long:
        update(learner, experience_of(block, rows_of(block, limit=0, n=None)))
        for role in learner.optimizers:
            learner.forget(role)
    began, clock = time.process_time(), time.perf_counter()
    update(learner, experience, apply=bool(args.long))
    spent, wall = time.process_time() - began, time.perf_counter() - clock
    tokens = int(batch["plen"].sum() + batch["rlen"].sum())
    parts = row_batches(experience.rows, args.budget, share=learner.actor.shares_prompts)
    return found | {
        "tokens": tokens,
        "rows": len(experience.rows),
        "micro_batches": len(parts),
        "budget": args.budget,
        "checkpointing": args.checkpointing,
        "cpu_seconds": round(spent, 3),
        "seconds": round(wall, 3),
        "cpu_ms_per_token": round(1000 * spent / tokens, 3),
        "peak_rss_mb": peak_mb(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--precision", choices=["exact", "fast"], default="exact")
    parser.add_argument("--long", type=int, default=0, help="tokens of one answer, in place of a batch")
    parser.add_argument("--checkpointing", action="store_true")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps(measured(parser.parse_args())), flush=True)
