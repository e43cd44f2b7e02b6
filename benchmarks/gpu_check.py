"""Speed and memory of updates, passes and generation on one GPU, as one table; gpu_check.sh calls it.

    python benchmarks/gpu_check.py --model runs/smollm2
    python benchmarks/gpu_check.py --cpu --tiny          # only that this script runs

An update is critic then actor on one mini-batch, forward, backward and the optimizer's steps. MFU is useful
FLOPs over what the chip's own matrix products reach in that precision (TF32 off), measured here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from results_io import table

from rein.config.recipe import Recipe
from rein.engines.hf import HfEngine
from rein.experience import in_micro_batches
from rein.learner import Learner
from rein.models import varlen
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.flops import Flops
from rein.models.place import Place
from rein.models.precision import refresh_copies
from rein.models.tiny import make_tiny
from rein.runtime.memory import free_models
from rein.runtime.single import SINGLE
from rein.types import Experience, Prompt, Trajectory, Update

HEAD = ("what", "seconds", "tokens/s", "MFU", "peak GB", "log-probs from exact")
ROUNDS = 5


class Size(NamedTuple):
    rows: int
    prompt: int  # tokens
    response: int
    budget: int
    written: int  # tokens of an answer


FULL, TINY = Size(128, 256, 256, 32768, 256), Size(6, 5, 7, 48, 4)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """The quickest of so many rounds, after one that is not timed."""
    best = float("inf")
    for i in range(rounds + 1):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        best = best if i == 0 else min(best, time.perf_counter() - begin)
    return best


def peak_flops(device: str, dtype: torch.dtype, side: int) -> float:
    """FLOP/s of the quickest square matrix product."""
    torch.set_float32_matmul_precision("highest")
    x, y = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 10 * 2.0 * side**3 / seconds(lambda: [x @ y for _ in range(10)], ROUNDS)


def made_rows(size: Size, vocabulary: int) -> list[Trajectory]:
    """Rows of random tokens, of half to the whole length each."""
    draw, found = np.random.default_rng(0), []
    for i in range(size.rows):
        lengths = [int(draw.integers(most // 2 + 1, most + 1)) for most in (size.prompt, size.response)]
        prompt, response = (draw.integers(3, vocabulary, length) for length in lengths)
        mask = np.ones(len(response), dtype=np.bool_)
        found.append(Trajectory(f"row {i}", "", prompt, response, mask, group=str(i)))
    return found


def learner_of(model: str, size: Size, place: Place, precision: str) -> Learner:
    recipe = Recipe.model_validate(
        {
            "data": {"train_batch_size": size.rows},
            "actor": {
                "ppo_mini_batch_size": size.rows,
                "ppo_max_token_len_per_gpu": size.budget,
                "use_kl_loss": False,
            },
        }
    )
    actor, critic = (load(model, precision=precision, place=place) for load in (load_actor, load_critic))
    return Learner(
        recipe, actor, critic, SINGLE,
        kl_coef_in_loss=0.0, kl_coef_in_reward=0.0, actor_steps=100, critic_steps=100,
    )  # fmt: skip


def experience_of(learner: Learner, rows: list[Trajectory]) -> Experience:
    actor = learner.actor
    assert isinstance(actor, Actor)
    old = in_micro_batches(rows, learner.token_budget, lambda some, temp: actor.log_probs(some, temp)[0])
    mask = torch.zeros_like(old, dtype=torch.bool)
    for i, row in enumerate(rows):
        mask[i, : len(row.response_ids)] = True
    drawn = torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(len(rows), dtype=torch.float64)
    return Experience(rows, mask, ones, old, advantages=drawn, values=torch.zeros_like(old), returns=drawn)


def ways(device: str) -> Iterator[tuple[str, Place, str]]:
    """Name, place and precision of each way that is installed."""
    yield "exact", Place(device), "exact"
    yield "fast", Place(device), "fast"
    if device == "cuda":
        for kernel in ("sdpa", *varlen.KERNELS):
            if varlen.installed(kernel):
                yield f"fast, {kernel}", Place(device, kernel), "fast"
        try:
            import liger_kernel  # noqa: F401
        except ImportError:
            return
        yield "fast, Liger", Place(device, liger=True), "fast"


def measured(
    model: str, name: str, place: Place, precision: str, size: Size, peaks: dict[str, float], rounds: int
) -> tuple[list[list[Any]], torch.Tensor]:
    """A row for an update and one for generation; the log-probs."""
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    learner = learner_of(model, size, place, precision)
    actor = learner.actor
    assert isinstance(actor, Actor)
    rows = made_rows(size, actor.vocabulary)
    experience = experience_of(learner, rows)
    every = tuple(range(len(rows)))

    def update() -> None:
        for role in ("critic", "actor"):
            learner.backward(Update(role, every, 0), experience)
            learner.apply(role)

    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    flops = sum(
        Flops(role.model).update(rows) for role in (learner.actor, learner.critic) if role is not None
    )
    spent = seconds(update, rounds)
    mfu = f"{flops / spent / peaks[precision]:.3f}"
    found = [[f"update, {name}", f"{spent:.3f}", f"{tokens / spent:,.0f}", mfu, peak_gb(place)]]
    if name in ("exact", "fast"):
        if place.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent, written = generated(actor, rows, size, rounds)
        found.append([f"generation, {name}", f"{spent:.3f}", f"{written / spent:,.0f}", "", peak_gb(place)])
    return found, experience.old_log_probs[experience.response_mask]


def generated(actor: Actor, rows: list[Trajectory], size: Size, rounds: int) -> tuple[float, int]:
    """Seconds and tokens of an answer to every prompt, all of one length."""
    engine = HfEngine(
        actor.model, actor.tokenizer, [], batch_size=128, before=lambda: refresh_copies(actor.model)
    )
    asked = [Prompt(row.where, "", row.prompt_ids) for row in rows]

    def answer() -> None:
        engine.generate(asked, n=1, temperature=1.0, top_p=1.0, max_new_tokens=size.written, seed=0)

    return seconds(answer, min(rounds, 2)), len(rows) * size.written


def peak_gb(place: Place) -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if place.device == "cuda" else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model's folder")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="sizes of no meaning, and a made model")
    args = parser.parse_args()
    device, size, rounds = (
        "cpu" if args.cpu else "cuda",
        TINY if args.tiny else FULL,
        1 if args.tiny else ROUNDS,
    )
    if device == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "gpu_check: torch sees no GPU here; nothing was measured\n")
    model = args.model or str(make_tiny(Path(tempfile.mkdtemp()) / "lm", seed=0, hidden=64, layers=2))
    side = 128 if args.tiny else 8192
    peaks = {
        "exact": peak_flops(device, torch.float32, side),
        "fast": peak_flops(device, torch.bfloat16, side),
    }
    lines, exact = [], None
    for name, place, precision in ways(device):
        found, log_probs = measured(model, name, place, precision, size, peaks, rounds)
        exact = log_probs if exact is None else exact
        apart = f"{(log_probs - exact).abs().mean():.2g} mean, {(log_probs - exact).abs().max():.2g} max"
        lines += [[*found[0], apart], *([*more, ""] for more in found[1:])]
        free_models()
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    said = ", ".join(f"{name} {flops / 1e12:.4g} TFLOP/s" for name, flops in peaks.items())
    print(f"{where}, torch {torch.__version__}; matrix products at best: {said}")
    print(f"{model}: {json.dumps(size._asdict())}\n")
    print(table(HEAD, lines))


if __name__ == "__main__":
    main()
