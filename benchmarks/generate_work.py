"""One way of generating, measured in its own process: tokens, CPU seconds and peak memory as a line of JSON.

    python benchmarks/generate_work.py rein --model runs/smollm2 --work work.json --batch 128

Every answer has its length given, so all ways write the same number of tokens; loading is not counted, nor is
vllm's compiling. Rein's bfloat16 is `model.precision=fast`, the others hold their weights in it. Imports of
each way are inside it: vllm lives in an environment of its own, which has nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Work = dict[str, Any]  # prompts: ids of each; lengths: of each answer to each
BLOCK, LONGEST = 32, 1024  # of vllm: tokens of a block, of a prompt with its answer


def rein(model: str, work: Work, batch: int, dtype: str) -> Callable[[], int]:
    """Rein's engine; with `padded` for a way, its path for other architectures."""
    return _engine(model, work, batch, dtype, fused=True)


def padded(model: str, work: Work, batch: int, dtype: str) -> Callable[[], int]:
    return _engine(model, work, batch, dtype, fused=False)


def _engine(model: str, work: Work, batch: int, dtype: str, *, fused: bool) -> Callable[[], int]:
    import numpy as np
    import torch

    from rein.engines.board import Ask, Manner
    from rein.engines.hf import HfEngine
    from rein.models.actor import load_actor
    from rein.runtime.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)
    actor = load_actor(model, precision="fast" if dtype == "bfloat16" else "exact")
    engine = HfEngine(actor.model.eval(), actor.tokenizer, [], batch_size=batch, fused=fused)
    n = len(work["lengths"][0])
    order = sorted(range(len(work["prompts"])), key=lambda i: -len(work["prompts"][i]))
    asks = [
        Ask(i, sample, np.array(work["prompts"][i]), work["lengths"][i][sample])
        for i in order
        for sample in range(n)
    ]
    manner = Manner(1.0, 1.0, 0, np.array([], dtype=np.int64), (), actor.tokenizer)

    def run() -> int:
        answers: list[list[Any]] = [[None] * n for _ in order]
        with torch.no_grad():
            engine.decode(asks, n, manner, answers)
        return sum(len(completion.response_ids) for some in answers for completion in some)

    return run


def hf(model: str, work: Work, batch: int, dtype: str) -> Callable[[], int]:
    """transformers' generate: `batch` answers at a time, sorted by prompt length, each until its longest."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(1)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0)
    rows = [
        (prompt, length)
        for prompt, lengths in zip(work["prompts"], work["lengths"], strict=True)
        for length in lengths
    ]
    rows.sort(key=lambda row: -len(row[0]))

    class Lengths(StoppingCriteria):
        def __init__(self, ends: torch.Tensor) -> None:
            self.ends = ends

        def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
            return input_ids.shape[1] >= self.ends

    def run() -> int:
        written = 0
        for begin in range(0, len(rows), batch):
            some = rows[begin : begin + batch]
            width = max(len(prompt) for prompt, _ in some)
            ids = torch.zeros(len(some), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for i, (prompt, _) in enumerate(some):
                ids[i, width - len(prompt) :] = torch.tensor(prompt)
                mask[i, width - len(prompt) :] = 1
            lengths = torch.tensor([length for _, length in some])
            config.max_new_tokens = int(lengths.max())
            lm.generate(
                ids, attention_mask=mask, generation_config=config,
                stopping_criteria=StoppingCriteriaList([Lengths(width + lengths)]),
            )  # fmt: skip
            written += int(lengths.sum())
        return written

    return run


def vllm(model: str, work: Work, batch: int, dtype: str) -> Callable[[], int]:
    """vllm for CPUs, in this process and compiled, prefix caching on.

    Its usual block of 128 tokens is longer than most prompts, of which nothing would be cached.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, max_num_seqs=batch, max_model_len=LONGEST, enable_prefix_caching=True,
        block_size=BLOCK, kv_cache_memory_bytes=cache_bytes(Path(model), work, batch, dtype), seed=0,
    )  # fmt: skip
    inputs, ways = [], []
    for prompt, lengths in zip(work["prompts"], work["lengths"], strict=True):
        for length in lengths:
            inputs.append({"prompt_token_ids": prompt})
            ways.append(SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0))

    def run() -> int:
        llm.reset_prefix_cache()
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(inputs, ways, use_tqdm=False))

    return run


def cache_bytes(model: Path, work: Work, batch: int, dtype: str) -> int:
    """Room for the longest `batch` answers at once: no answer ever waits, and no more is taken.

    Left to itself vllm takes the machine's memory.
    """
    config = json.loads((model / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * (hidden // heads)
    blocks = sorted(
        -(-(len(prompt) + length) // BLOCK)
        for prompt, lengths in zip(work["prompts"], work["lengths"], strict=True)
        for length in lengths
    )
    tokens = max(BLOCK * (sum(blocks[-batch:]) + 1), LONGEST)
    return tokens * numbers * (2 if dtype == "bfloat16" else 4)


WAYS = {"rein": rein, "padded": padded, "hf": hf, "vllm": vllm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    words = parser.parse_args()
    run = WAYS[words.way](words.model, json.loads(words.work.read_text()), words.batch, words.dtype)
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = run()
    spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"tokens": tokens, **spent, "peak_mb": peak}))


if __name__ == "__main__":
    main()
