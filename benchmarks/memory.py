"""What `rein check` says of the memory of `rein train`, beside what every process really takes.

    python benchmarks/memory.py --out runs/memory

Three random Llama-shaped models, an actor and a critic of each, and made rows; a critic fit and two updates
of either role, probe, validation and snapshot included, in one process and on two ranks (runtime=fsdp
nproc=2), one thread each. Measured is a process's largest resident memory (VmHWM, read from outside every few
milliseconds) less the idle one: VmRSS of a process that has imported what the stage imports, the classes of
both models among it, and opened nothing. Estimated is the sum that check prints less the same,
`check_memory.PROCESS`. The claim: within 15 % of each other for each process. In one process freed memory is
kept and its gaps are others in each run: it is measured more than once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from results_io import table, write
from transformers import LlamaConfig, LlamaForCausalLM

from rein.commands import check
from rein.commands.check_memory import PROCESS
from rein.config.load import load
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES
from rein.models.attention import register
from rein.models.tiny import tiny_tokenizer
from rein.tracking.console import Console

ALLOWED = 0.15
MIB = 2**20
ROWS, TRAINED, MINI, BUDGET = 32, 16, 8, 512  # rows, those that are not held out, of an update; tokens
SHAPES: dict[str, dict[str, Any]] = {
    "large vocabulary, tied": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 24000, "tie_word_embeddings": True,
    },
    "deep and narrow": {
        "hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 20,
        "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 2000, "tie_word_embeddings": False,
    },
    "wide, 4 key heads for 16": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4000, "tie_word_embeddings": True,
    },
}  # fmt: skip
IMPORTS = """
import rein.cli, rein.stages.train
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
import rein.runtime.launch
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def make_model(folder: Path, shape: dict[str, Any]) -> int:
    """Random weights and a tokenizer of characters; how many parameters."""
    tokenizer = tiny_tokenizer()
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **ends, max_position_embeddings=512))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def make_rows(file: Path) -> None:
    """Answers of 40 to 120 tokens, each to a prompt of its own of 20 to 40."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(ROWS):
        prompt, answer = (
            draw.integers(3, 18, draw.integers(*ends)).tolist() for ends in ((20, 41), (40, 121))
        )
        rows.append(
            {
                "prompt": f"prompt {i}",
                "prompt_ids": prompt,
                "response_ids": answer,
                "behavior_log_probs": [-7.0] * len(answer),
                "score": float(draw.integers(0, 2)),
                "group": str(i),
            }
        )
    write_rows(file, rows, TRAJECTORIES)


def words(model: Path, rows: Path, out: Path, ranks: int, precision: str) -> list[str]:
    many = ["runtime=fsdp", f"nproc={ranks}"] if ranks > 1 else []
    return [
        f"model.path={model}", f"data.train_files={rows}", f"out={out}", f"cache={out}/cache", "threads=1",
        f"model.precision={precision}", f"data.train_batch_size={TRAINED}", "resume=never",
        f"actor.ppo_mini_batch_size={MINI}", "actor.ppo_epochs=1", "trainer.critic_warmup=1",
        f"actor.ppo_max_token_len_per_gpu={BUDGET}", "score.reward=exact", "rollout.max_new_tokens=16",
        "trainer.val_prompts=8", "guards.preset=off", *many,
    ]  # fmt: skip


def of_status(process: int, name: str) -> int:
    """Bytes; 0 of a process that is gone."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return 0


def ranks_of(leader: int) -> list[int]:
    """The process and the other ranks that it has started."""
    found = [leader]
    with suppress(OSError):
        for child in Path(f"/proc/{leader}/task/{leader}/children").read_text().split():
            with suppress(OSError):
                if b"rein.runtime.launch" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def idle() -> int:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, env=environment(), check=True)
    return 1024 * int(done.stdout.split()[-1])


def peaks(command: list[str], seconds: float) -> dict[int, int]:
    """The largest resident memory of each process of a command, in the order of their start."""
    found: dict[int, int] = {}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        for rank in ranks_of(process.pid):
            found[rank] = max(found.get(rank, 0), of_status(rank, "VmHWM"))
        time.sleep(0.005)
    if process.poll() is None:
        process.kill()
    _, error = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{error.decode()[-2000:]}")
    return found


def measured(name: str, folder: Path, ranks: int, precision: str, seconds: float) -> list[dict[str, Any]]:
    """A line for each process."""
    out = folder / f"{precision}-{ranks}"
    some = words(folder / "model", folder.parent / "rows.parquet", out, ranks, precision)
    parts = check.run(load(None, some)[0], Console(quiet=True))["memory"]["train"]
    estimated, unused = parts.total - PROCESS, idle()
    names = (
        "weights",
        "gradients",
        "adam",
        "gathered",
        "activations",
        "probe",
        "decoding",
        "opening",
        "holes",
    )
    started = time.monotonic()
    found = peaks([sys.executable, "-m", "rein", "train", *some], seconds)
    took = time.monotonic() - started
    assert len(found) == ranks, found
    lines = []
    for rank, peak in enumerate(found.values()):
        line = {"shape": name, "precision": precision, "ranks": ranks, "rank": rank, "seconds": round(took)}
        line |= {"idle_mib": round(unused / MIB), "peak_mib": round(peak / MIB)}
        line |= {"measured_mib": round((peak - unused) / MIB), "estimated_mib": round(estimated / MIB)}
        line["off"] = round(estimated / (peak - unused) - 1, 3)
        line["parts_mib"] = {name: round(getattr(parts, name) / MIB) for name in names}
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def report(rows: list[dict[str, Any]], parameters: dict[str, int]) -> str:
    head = ["model", "parameters", "precision", "ranks", "rank", "idle, MiB", "measured", "estimated", "off"]
    shown = [
        [
            row["shape"], f"{parameters[row['shape']] / 1e6:.1f}M", row["precision"], row["ranks"],
            row["rank"], row["idle_mib"], row["measured_mib"], row["estimated_mib"], f"{row['off']:+.1%}",
        ]
        for row in rows
    ]  # fmt: skip
    worst = max(abs(row["off"]) for row in rows)
    parts = [
        [
            row["shape"],
            row["precision"],
            row["ranks"],
            ", ".join(f"{k} {v}" for k, v in row["parts_mib"].items()),
        ]
        for row in rows
        if row["rank"] == 0
    ]
    parts = [part for i, part in enumerate(parts) if part not in parts[:i]]
    return "\n\n".join(
        [
            table(head, shown),
            f"Measured: largest resident memory less the idle process's. Estimated: what `rein check` says, "
            f"less {PROCESS / MIB:.0f} MiB for the process. Farthest off: {worst:.1%}; allowed "
            f"{ALLOWED:.0%}: {'held' if worst <= ALLOWED else 'broken'}.",
            "The constants that check_memory.py calls measured were set by runs of these models at these "
            "sizes: of other models and sizes the table promises less.",
            "What the estimates are made of, MiB:",
            table(["model", "precision", "ranks", "parts"], parts),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--precisions", nargs="+", default=["exact"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=2, help="of one process")
    parser.add_argument("--seconds", type=float, default=300, help="the most that one run may take")
    args = parser.parse_args()
    register()
    args.out.mkdir(parents=True, exist_ok=True)
    make_rows(args.out / "rows.parquet")
    rows, parameters = [], {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        folder = args.out / str(number)
        parameters[name] = make_model(folder / "model", shape)
        for precision in args.precisions:
            for ranks in [1] * args.runs * (1 in args.ranks) + [n for n in args.ranks if n > 1]:
                rows += measured(name, folder, ranks, precision, args.seconds)
    text = report(rows, parameters)
    settings = {"rows": ROWS, "trained": TRAINED, "mini_batch": MINI, "budget": BUDGET, "shapes": SHAPES}
    write("memory", settings, rows, text)
    print(text)


if __name__ == "__main__":
    main()
