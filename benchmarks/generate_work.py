"""One way of generating, measured in its own process: tokens, CPU seconds and peak memory as a line of JSON.

    python benchmarks/generate_work.py rein --model runs/smollm2 --work work.json --batch 128

Every answer has its length given, so all ways write the same number of tokens; loading is not counted.
Imports of each way are inside it: vllm lives in an environment of its own, which has nothing else.
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
    from rein.models.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    engine = HfEngine(_causal_lm(model, dtype), tokenizer, [], batch_size=batch, fused=fused)
    n = len(work["lengths"][0])
    order = sorted(range(len(work["prompts"])), key=lambda i: -len(work["prompts"][i]))
    asks = [
        Ask(i, sample, np.array(work["prompts"][i]), work["lengths"][i][sample])
        for i in order
        for sample in range(n)
    ]
    manner = Manner(1.0, 1.0, 0, np.array([], dtype=np.int64), (), tokenizer)

    def run() -> int:
        answers: list[list[Any]] = [[None] * n for _ in order]
        with torch.no_grad():
            engine.decode(asks, n, manner, answers)
        return sum(len(completion.response_ids) for some in answers for completion in some)

    return run


def hf(model: str, work: Work, batch: int, dtype: str) -> Callable[[], int]:
    """transformers' generate: `batch` answers at a time, sorted by prompt length, each until its longest."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    lm = _causal_lm(model, dtype)
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
    """vllm for CPUs, in this process, prefix caching on."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "8")  # GB; left to itself it takes the machine's memory
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=True,
        enforce_eager=True, seed=0,
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


def _causal_lm(model: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


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
