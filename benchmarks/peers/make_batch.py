"""The stored batch that every framework updates on: 16 prompts x 4 answers, seed 7.

    python benchmarks/peers/make_batch.py --model runs/smollm2 --out batch.npz

Prompts of 30 to 150 tokens, answers of 10 to 300, both log-normal, out of the documentation that comes with
Python. Written: `plen`, `rlen`, `group` for each trajectory; `prompt`, `resp` end to end (a prompt once for
each of its answers); for each answer token `true_logp` (the model's own, float32), `old_logp` and `ref_logp`
(that with noise), `values`, `adv`, `ret` (noise).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

BEGIN, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
LONGEST = 300
CHARACTERS = 200_000


def sequences(
    tokenizer: Any, draw: np.random.Generator, prompts: int, n: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts in the chat format, and answers that end unless they were cut at the longest length."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())[:CHARACTERS]
    stream = tokenizer(text).input_ids
    begin, end = tokenizer(BEGIN).input_ids, tokenizer(END).input_ids

    def piece(length: int) -> list[int]:
        at = int(draw.integers(0, len(stream) - length))
        return list(stream[at : at + length])

    sizes = np.clip(np.round(draw.lognormal(np.log(70), 0.45, prompts)), 30, 150).astype(int)
    sizes[0], sizes[-1] = 30, 150
    given = [begin + piece(size - len(begin) - len(end)) + end for size in sizes]
    sizes = np.clip(np.round(draw.lognormal(np.log(85), 0.8, prompts * n)), 10, LONGEST).astype(int)
    answers = [piece(size) for size in sizes]
    for answer in answers:
        if len(answer) < LONGEST:
            answer[-1] = tokenizer.eos_token_id
    return given, answers


@torch.no_grad()
def log_probs(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=4, help="answers a prompt")
    args = parser.parse_args()
    draw = np.random.default_rng(7)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    given, answers = sequences(tokenizer, draw, args.prompts, args.n)
    given = [prompt for prompt in given for _ in range(args.n)]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    said = torch.cat([log_probs(model, p, a) for p, a in zip(given, answers, strict=True)]).numpy()

    def noise(deviation: float) -> np.ndarray:
        return draw.normal(0, deviation, len(said)).astype(np.float32)

    arrays = {
        "plen": np.array([len(prompt) for prompt in given]),
        "rlen": np.array([len(answer) for answer in answers]),
        "group": np.repeat(np.arange(args.prompts), args.n),
        "prompt": np.concatenate(given).astype(np.int32),
        "resp": np.concatenate(answers).astype(np.int32),
        "true_logp": said,
        "old_logp": said + noise(0.05),
        "ref_logp": said + noise(0.1),
        "values": noise(0.3),
        "adv": noise(1.0),
        "ret": noise(0.5),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, **arrays)
    tokens = arrays["plen"].sum() + len(said)
    print(f"{args.out}: {len(given)} trajectories, {tokens} tokens, {len(said)} of answers")


if __name__ == "__main__":
    main()
