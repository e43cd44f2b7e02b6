"""Generation: Rein's engine beside transformers' generate and, where it is installed, vllm, on SmolLM2-135M.

    python benchmarks/generate.py --model runs/smollm2 [--vllm PYTHON] [--prompts 128] [--runs 3]

128 prompts (30 to 150 tokens) x 4 answers whose lengths are drawn once, log-normal, 10 to 300: what real
answers do to a batch. One thread, each run a process of its own, ways taken in turn, medians of CPU seconds;
each way at the best of three batch sizes. vllm is run by the PYTHON of its own environment. Greedy answers in
float32 are compared with those of transformers token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write
from smol_model import convert

from rein.engines.hf import HfEngine
from rein.models.load import load_causal_lm, load_tokenizer
from rein.types import Prompt

ANSWERS, GREEDY_PROMPTS, GREEDY_TOKENS = 4, 32, 64
BATCHES = (32, 128, 512)
NAMES = {
    "rein": "Rein", "padded": "Rein, any architecture", "hf": "transformers generate", "vllm": "vllm",
}  # fmt: skip
Row = dict[str, Any]


def work_of(tokenizer: Any, prompts: int, seed: int) -> dict[str, list[Any]]:
    """Prompts out of English text (the standard library's documentation) and a length for each answer."""
    draw = np.random.default_rng(seed)
    text = " ".join((sys.modules[name].__doc__ or "") for name in sorted(sys.modules))
    stream = tokenizer.encode(" ".join(text.split()), add_special_tokens=False)
    sizes = np.clip(np.round(draw.lognormal(np.log(70), 0.45, prompts)), 30, 150).astype(int)
    begins = [int(draw.integers(0, len(stream) - size)) for size in sizes]
    lengths = np.clip(np.round(draw.lognormal(np.log(85), 0.8, (prompts, ANSWERS))), 10, 300).astype(int)
    return {
        "prompts": [stream[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)],
        "lengths": lengths.tolist(),
    }


def measured(python: str, way: str, words: list[str]) -> Row:
    """One run of one way."""
    script = str(Path(__file__).parent / "generate_work.py")
    done = subprocess.run(
        [python, script, way, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{way}: exit {done.returncode}\n{done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(words: argparse.Namespace, ways: dict[str, str], work: Path, dtype: str) -> list[Row]:
    """Each way at its best batch size, medians of the runs."""
    options = ["--model", str(words.model), "--work", str(work), "--dtype", dtype]
    first = {
        (way, batch): measured(python, way, [*options, "--batch", str(batch)])
        for way, python in ways.items()
        for batch in words.batches
    }
    best = {way: min(words.batches, key=lambda batch: first[way, batch]["cpu_s"]) for way in ways}
    runs = {way: [first[way, best[way]]] for way in ways}
    for _ in range(words.runs - 1):
        for way, python in ways.items():
            runs[way].append(measured(python, way, [*options, "--batch", str(best[way])]))
    rows = []
    for way, some in runs.items():
        seconds = statistics.median(run["cpu_s"] for run in some)
        rows.append(
            {
                "way": way,
                "dtype": dtype,
                "batch": best[way],
                "tokens": some[0]["tokens"],
                "cpu_s": seconds,
                "tokens_per_cpu_s": some[0]["tokens"] / seconds,
                "peak_mb": max(run["peak_mb"] for run in some),
                "all_cpu_s": [run["cpu_s"] for run in some],
                "other_batches": {b: first[way, b]["cpu_s"] for b in words.batches},
            }
        )
    return rows


def greedy_equal(model: str, work: dict[str, list[Any]]) -> tuple[int, int]:
    """How many greedy answers in float32 are transformers' own, of how many."""
    torch.set_num_threads(1)
    lm, tokenizer = load_causal_lm(model, dtype="float32"), load_tokenizer(model)
    ids = work["prompts"][:GREEDY_PROMPTS]
    prompts = [Prompt(f"prompt {i}", "", np.array(some, dtype=np.int64)) for i, some in enumerate(ids)]
    found = HfEngine(lm, tokenizer, []).generate(
        prompts, n=1, temperature=0.0, top_p=1.0, max_new_tokens=GREEDY_TOKENS, seed=0
    )
    equal = 0
    for some, (completion,) in zip(ids, found, strict=True):
        given = torch.tensor([some])
        lm.eval()
        theirs = lm.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, use_cache=True,
            max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS,
        )  # fmt: skip
        equal += completion.response_ids.tolist() == theirs[0, len(some) :].tolist()
    return equal, len(ids)


def text_of(rows: list[Row], equal: tuple[int, int]) -> str:
    head = ["precision", "way", "batch", "CPU s", "tokens / CPU s", "Rein is faster by", "peak MB"]
    ours = {row["dtype"]: row["cpu_s"] for row in rows if row["way"] == "rein"}
    body = [
        [
            row["dtype"], NAMES[row["way"]], row["batch"], f"{row['cpu_s']:.1f}",
            f"{row['tokens_per_cpu_s']:.0f}", f"{row['cpu_s'] / ours[row['dtype']]:.2f}", row["peak_mb"],
        ]
        for row in rows
    ]  # fmt: skip
    return (
        f"{rows[0]['tokens']} tokens in answers of 10 to 300 (log-normal), {ANSWERS} to a prompt, on one "
        f"thread, each way at its best batch size.\n\n{table(head, body)}\n\n"
        f"Greedy answers of {GREEDY_TOKENS} tokens in float32 equal to transformers': {equal[0]} of "
        f"{equal[1]}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--ways", nargs="+", default=["rein", "padded", "hf"], choices=["rein", "padded", "hf"]
    )
    parser.add_argument("--vllm", help="the python of an environment with vllm")
    parser.add_argument("--name", default="generate", help="of the files in results/")
    words = parser.parse_args()
    convert(words.model)
    work = work_of(load_tokenizer(str(words.model)), words.prompts, seed=7)
    ways = dict.fromkeys(words.ways, sys.executable) | ({"vllm": words.vllm} if words.vllm else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        rows = [row for dtype in words.dtypes for row in compared(words, ways, file, dtype)]
    equal = greedy_equal(str(words.model), work)
    settings = {
        "prompts": words.prompts,
        "answers": ANSWERS,
        "runs": words.runs,
        "batches": list(words.batches),
    }
    text = text_of(rows, equal)
    write(words.name, settings | {"greedy_equal": equal}, rows, text)
    print(text)


if __name__ == "__main__":
    main()
