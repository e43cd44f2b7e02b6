"""What `rein check` reckons a training process needs, beside what it took, in one process and on two ranks.

    python benchmarks/memory.py [--model runs/smollm2]

Three models: 26M and 86M parameters made here, and, where --model is given, that one. 32 stored rows of 256
tokens, one batch of critic and actor updates with Adam. Measured is each process's highest resident memory
(the largest of the ranks), less that of a process that has imported what training imports and no more; the
reckoned sum is without its own allowance for that.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

from rein.commands.check import run as check
from rein.commands.check_memory import PROCESS
from rein.config.load import load
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES
from rein.models.tiny import make_tiny
from rein.tracking.console import Console

ROWS, PROMPT, RESPONSE, BUDGET = 32, 64, 192, 1024
MADE = {"26M": (512, 10), "86M": (768, 15)}  # hidden size, layers
MIB, ALLOWED = 2**20, 0.15
IDLE = "import time, rein.stages.train, transformers.models.qwen2, transformers.models.llama; time.sleep(3)"


def peak_of(process: subprocess.Popen[bytes]) -> list[float]:
    """The highest resident memory of a process and of those it started, in bytes, when it has ended."""
    found: dict[int, int] = {}
    while process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            for name in ("VmHWM",):
                found[pid] = max(found.get(pid, 0), status(pid, name))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"exit {process.returncode}")
    return [float(peak) for peak in found.values() if peak > 200 * MIB]  # not its helpers


def children(pid: int) -> list[int]:
    done = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def status(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def started(*words: str) -> subprocess.Popen[bytes]:
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, *words], env=quiet, stdout=subprocess.DEVNULL)


def write_trajectories(target: Path, vocabulary: int) -> None:
    draw = np.random.default_rng(0)
    rows = [
        {
            "prompt_ids": draw.integers(3, vocabulary, PROMPT).tolist(),
            "response_ids": draw.integers(3, vocabulary, RESPONSE).tolist(),
            "score": float(i % 2),
            "group": f"group {i}",
        }
        for i in range(ROWS)
    ]
    write_rows(target, rows, TRAJECTORIES)


def words_of(folder: Path, model: str, ranks: int) -> list[str]:
    where = ["runtime=fsdp", f"nproc={ranks}"] if ranks > 1 else []
    return [
        *where, f"out={folder}/run{ranks}", f"cache={folder}/cache", f"model.path={model}", "threads=1",
        f"data.train_files={folder}/rows.parquet", f"data.train_batch_size={ROWS}", "data.holdout_fraction=0",
        "data.max_response_length=256", f"actor.ppo_mini_batch_size={ROWS}", "actor.ppo_epochs=1",
        f"actor.ppo_max_token_len_per_gpu={BUDGET}", "actor.use_kl_loss=false", "guards.preset=off",
        "trainer.critic_warmup=0", "trainer.val_before_train=false", "trainer.logger=jsonl",
    ]  # fmt: skip


def measured(name: str, model: str, folder: Path, ranks: int, idle: float) -> dict[str, Any]:
    words = words_of(folder, model, ranks)
    recipe, _ = load(None, words)
    parts = check(recipe, Console(quiet=True))["memory"]["train"]
    took = max(peak_of(started("-m", "rein", "train", *words))) - idle
    reckoned = parts.total - PROCESS
    row = {"model": name, "ranks": ranks, "reckoned_mb": reckoned / MIB, "measured_mb": took / MIB}
    return row | {"off": reckoned / took - 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model folder beside those made here")
    args = parser.parse_args()
    idle = max(peak_of(started("-c", IDLE)))
    rows = []
    with tempfile.TemporaryDirectory(prefix="rein-memory-") as name:
        for shape in [*MADE, *([Path(args.model).name] if args.model else [])]:
            folder = Path(name) / shape
            folder.mkdir()
            made, vocabulary = shape in MADE, 18 if shape in MADE else 40_000
            if made:
                hidden, layers = MADE[shape]
                make_tiny(folder / "model", seed=0, hidden=hidden, layers=layers)
            write_trajectories(folder / "rows.parquet", vocabulary)
            for ranks in (1, 2):
                model = str(folder / "model") if made else args.model
                rows.append(measured(shape, model, folder, ranks, idle))
                print(rows[-1], flush=True)
    head = ["model", "ranks", "reckoned MB", "measured MB", "off by"]
    body = [
        [r["model"], r["ranks"], f"{r['reckoned_mb']:.0f}", f"{r['measured_mb']:.0f}", f"{r['off']:+.1%}"]
        for r in rows
    ]
    within = sum(abs(row["off"]) <= ALLOWED for row in rows)
    text = (
        f"Training of {ROWS} rows of {PROMPT + RESPONSE} tokens, budget {BUDGET}, all weights, float32; an "
        f"idle process holds {idle / MIB:.0f} MB. {within} of {len(rows)} are within {ALLOWED:.0%}.\n\n"
        f"{table(head, body)}"
    )
    write("memory", {"rows": ROWS, "tokens": PROMPT + RESPONSE, "budget": BUDGET, "idle": idle}, rows, text)
    print(text)


if __name__ == "__main__":
    main()
