"""Generation: Rein's engine beside transformers' generate and, where it is installed, vllm, on SmolLM2-135M.

    python benchmarks/generate.py --model runs/smollm2 [--vllm PYTHON] [--prompts 128] [--runs 3]

128 prompts (30 to 150 tokens) x 4 answers whose lengths are drawn once, log-normal, 10 to 300: what real
answers do to a batch. One thread, each run a process of its own, ways taken in turn, medians of CPU seconds;
each way at the best of three batch sizes, found on the quarter of the prompts whose lengths are nearest to
the middle. What transformers took on that quarter is its result (--whole: all prompts): it works through one
batch after the other, so that more prompts cost it more of the same, and prompts of like lengths spare it
padding. vllm is run by the PYTHON of its own environment. Greedy answers in float32 are compared with those
of transformers token by token.
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
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write
from smol_model import convert

from rein.engines.hf import HfEngine
from rein.models.load import load_causal_lm, load_tokenizer
from rein.types import Prompt

ANSWERS, GREEDY_PROMPTS, GREEDY_TOKENS = 4, 32, 64
BATCHES = (32, 64, 128)
CHARACTERS = 200_000  # of the documentation that prompts are cut from
PART = 4  # batch sizes are tried on the middle one of so many equal parts
BY_BATCH = ("hf", "padded")  # ways that cost the same for each batch: the part is enough
NAMES = {
    "rein": "Rein", "padded": "Rein, any architecture", "hf": "transformers generate", "vllm": "vllm",
}  # fmt: skip
Row = dict[str, Any]


def work_of(tokenizer: Any, prompts: int, answers: int, seed: int) -> dict[str, list[Any]]:
    """Prompts out of English text (the documentation that comes with Python), a length for each answer."""
    draw = np.random.default_rng(seed)
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())[:CHARACTERS]
    stream = tokenizer.encode(text, add_special_tokens=False)
    sizes = np.clip(np.round(draw.lognormal(np.log(70), 0.45, prompts)), 30, 150).astype(int)
    begins = [int(draw.integers(0, len(stream) - size)) for size in sizes]
    lengths = np.clip(np.round(draw.lognormal(np.log(85), 0.8, (prompts, answers))), 10, 300).astype(int)
    return {
        "prompts": [stream[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)],
        "lengths": lengths.tolist(),
    }


def middle_part(work: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The prompts whose lengths are nearest to the middle, as one of PART equal parts."""
    count = len(work["prompts"])
    order = sorted(range(count), key=lambda i: len(work["prompts"][i]))
    size = max(count // PART, 1)
    begin = (count - size) // 2
    return {name: [some[i] for i in sorted(order[begin : begin + size])] for name, some in work.items()}


def measured(python: str, way: str, words: list[str]) -> Row:
    """One run of one way."""
    script = str(Path(__file__).parent / "generate_work.py")
    done = subprocess.run(
        [python, script, way, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{way}: exit {done.returncode}\n{done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(words: argparse.Namespace, ways: dict[str, str], folder: Path, dtype: str) -> list[Row]:
    """Each way at its best batch size, medians of the runs."""

    def run(way: str, batch: int, file: str) -> Row:
        options = ["--model", str(words.model), "--work", str(folder / file), "--dtype", dtype]
        found = measured(ways[way], way, [*options, "--batch", str(batch)])
        print(f"{dtype} {way} batch {batch} {file}: {found['cpu_s']:.1f} cpu-s", flush=True)
        return found

    tried = {way: {batch: run(way, batch, "part.json") for batch in words.batches} for way in ways}
    best = {way: min(some, key=lambda batch: some[batch]["cpu_s"]) for way, some in tried.items()}
    parts = {way: not words.whole and way in BY_BATCH for way in ways}
    runs: dict[str, list[Row]] = {way: [tried[way][best[way]]] if parts[way] else [] for way in ways}
    for _ in range(words.runs):
        for way in ways:
            if not parts[way]:
                runs[way].append(run(way, best[way], "work.json"))
    rows = []
    for way, some in runs.items():
        seconds = statistics.median(one["cpu_s"] for one in some)
        rows.append(
            {
                "way": way,
                "dtype": dtype,
                "batch": best[way],
                "tokens": some[0]["tokens"],
                "cpu_s": seconds,
                "tokens_per_cpu_s": some[0]["tokens"] / seconds,
                "peak_mb": max(one["peak_mb"] for one in some),
                "all_cpu_s": [one["cpu_s"] for one in some],
                "part_cpu_s": {batch: one["cpu_s"] for batch, one in tried[way].items()},
            }
        )
    return rows


def greedy_equal(model: str, work: dict[str, list[Any]]) -> tuple[int, int]:
    """How many greedy answers in float32 are transformers' own, of how many; its model is loaded apart."""
    torch.set_num_threads(1)
    lm, tokenizer = load_causal_lm(model, dtype="float32"), load_tokenizer(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = work["prompts"][:GREEDY_PROMPTS]
    prompts = [Prompt(f"prompt {i}", "", np.array(some, dtype=np.int64)) for i, some in enumerate(ids)]
    found = HfEngine(lm, tokenizer, []).generate(
        prompts, n=1, temperature=0.0, top_p=1.0, max_new_tokens=GREEDY_TOKENS, seed=0
    )
    equal = 0
    for some, (completion,) in zip(ids, found, strict=True):
        given = torch.tensor([some])
        theirs = plain.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, use_cache=True,
            max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS,
        )  # fmt: skip
        equal += completion.response_ids.tolist() == theirs[0, len(some) :].tolist()
    return equal, len(ids)


def text_of(rows: list[Row], answers: int, equal: tuple[int, int]) -> str:
    head = ["precision", "way", "batch", "tokens", "CPU s", "tokens / CPU s", "Rein is faster by", "peak MB"]
    ours = {row["dtype"]: row["tokens_per_cpu_s"] for row in rows if row["way"] == "rein"}
    body = [
        [
            row["dtype"], NAMES[row["way"]], row["batch"], row["tokens"], f"{row['cpu_s']:.1f}",
            f"{row['tokens_per_cpu_s']:.0f}", f"{ours[row['dtype']] / row['tokens_per_cpu_s']:.2f}",
            row["peak_mb"],
        ]
        for row in rows
    ]  # fmt: skip
    return (
        f"Answers of 10 to 300 tokens (log-normal), {answers} to a prompt, on one thread, each way at its "
        "best batch size; Rein's float32 and bfloat16 are its `exact` and `fast`. Fewer tokens: measured on "
        f"the prompts of middle length, a quarter of them.\n\n{table(head, body)}\n\n"
        f"Greedy answers of {GREEDY_TOKENS} tokens in float32 equal to transformers': {equal[0]} of "
        f"{equal[1]}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=ANSWERS, help="to a prompt")
    parser.add_argument("--runs", type=int, default=3, help="on all prompts")
    parser.add_argument("--whole", action="store_true", help="run every way on all prompts")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=["rein", "hf"], choices=["rein", "padded", "hf"])
    parser.add_argument("--vllm", help="the python of an environment with vllm")
    parser.add_argument("--name", default="generate", help="of the files in results/")
    words = parser.parse_args()
    convert(words.model)
    work = work_of(load_tokenizer(str(words.model)), words.prompts, words.answers, seed=7)
    ways = dict.fromkeys(words.ways, sys.executable) | ({"vllm": words.vllm} if words.vllm else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps(work))
        (folder / "part.json").write_text(json.dumps(middle_part(work)))
        rows = [row for dtype in words.dtypes for row in compared(words, ways, folder, dtype)]
    equal = greedy_equal(str(words.model), work)
    settings = {
        "prompts": words.prompts,
        "answers": words.answers,
        "runs": words.runs,
        "batches": list(words.batches),
    }
    text = text_of(rows, words.answers, equal)
    write(words.name, settings | {"greedy_equal": equal}, rows, text)
    print(text)


if __name__ == "__main__":
    main()
