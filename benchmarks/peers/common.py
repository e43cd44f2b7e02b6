"""What the peers' scripts share: options, the stored batch, the two models, the clock and the JSON line.

Imports numpy, torch and transformers only, so that it runs in each peer's own environment. What is timed is
forward and backward over the whole batch as one mini-batch, policy and critic, no optimizer step; with
`--loop` the whole job, by phase: what `end_to_end.py` asks for.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CLIP, VALUE_CLIP, VALUE_COEF = 0.2, 0.2, 0.1
GAMMA, LAM, KL_COEF, LR = 1.0, 0.95, 0.05, 1e-6  # of the whole job
PER_TOKEN = ("old_logp", "ref_logp", "values", "adv", "ret")


def options() -> argparse.ArgumentParser:
    """The options of every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--limit", type=int, default=0, help="the first so many trajectories")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--score", action="store_true", help="log-probs and values without gradients")
    parser.add_argument("--matmul", choices=["highest", "medium"], default="highest", help="of float32")
    parser.add_argument("--dump", type=Path, help="an .npz for log-probs, values and gradient norms")
    parser.add_argument("--loop", type=Path, help="the whole job; the trained policy goes into this folder")
    parser.add_argument("--mini", type=int, default=16, help="rows of an optimizer step of the whole job")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision(args.matmul)
    torch.manual_seed(0)
    return args


class Batch:
    """The trajectories of `make_batch.py`; what is stored for each answer token is a list of tensors."""

    def __init__(self, path: Path, limit: int) -> None:
        stored = np.load(path)
        self.n = n = min(limit or len(stored["plen"]), len(stored["plen"]))
        self.prompt_lengths, self.lengths = stored["plen"][:n].tolist(), stored["rlen"][:n].tolist()
        prompts, ends = np.cumsum(stored["plen"])[:-1], np.cumsum(stored["rlen"])[:-1]
        self.prompts = [torch.from_numpy(a).long() for a in np.split(stored["prompt"], prompts)[:n]]
        self.responses = [torch.from_numpy(a).long() for a in np.split(stored["resp"], ends)[:n]]
        self.stored = {
            name: [torch.from_numpy(a).float() for a in np.split(stored[name], ends)[:n]]
            for name in PER_TOKEN
        }
        # The batch holds no scores: what is stored as an answer's last return stands for one.
        self.scores = [float(a[-1]) for a in self.stored["ret"]]
        self.response_tokens = sum(self.lengths)
        self.tokens = sum(self.prompt_lengths) + self.response_tokens


def load_models(path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The policy, and the critic: the same trunk with a linear head of one output."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    some: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    policy = AutoModelForCausalLM.from_pretrained(path, **some)
    critic = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **some)
    policy.config.use_cache = critic.config.use_cache = False
    head = torch.randn(critic.score.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.02
    with torch.no_grad():
        critic.score.weight.copy_(head)
    return policy, critic


def autocast(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")


def timed(work: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Medians of CPU and wall seconds of some runs of `work`."""
    cpu, wall = [], []
    for _ in range(repeats):
        began, clock = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - began)
        wall.append(time.perf_counter() - clock)
    return seconds(cpu, wall)


def seconds(cpu: list[float], wall: list[float]) -> dict[str, Any]:
    return {
        "cpu_seconds": round(statistics.median(cpu), 3),
        "seconds": round(statistics.median(wall), 3),
        "all_cpu_seconds": [round(s, 3) for s in cpu],
    }


class Phases:
    """CPU and wall seconds of named parts of a job, summed over their turns; what comes before is `load`."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {"load": time.process_time()}
        self.wall: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, clock = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - began
        self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - clock

    def found(self) -> dict[str, Any]:
        said = {"phases_cpu_seconds": self.cpu, "phases_seconds": self.wall}
        return {kind: {name: round(s, 3) for name, s in some.items()} for kind, some in said.items()}


class Peak:
    """The most memory this process has held, but for parts that are left out."""

    def __init__(self) -> None:
        self.before = 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What is held inside, and given back at its end, counts for nothing (Linux)."""
        self.before = self.mb()
        yield
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew

    def mb(self) -> int:
        """Its high-water mark, in MiB."""
        lines = Path("/proc/self/status").read_text().splitlines()
        mark = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        return max(self.before, round(mark / 1024))


PEAK = Peak()


def report(name: str, args: argparse.Namespace, batch: Batch, found: dict[str, Any]) -> None:
    """The JSON line: real tokens (no padding) and the peak memory of the whole process."""
    what = "whole job" if args.loop else "score" if args.score else "update"
    line = {
        "name": f"{name}, {what}",
        **found,
        "tokens": batch.tokens,
        "response_tokens": batch.response_tokens,
        "trajectories": batch.n,
        "peak_rss_mb": PEAK.mb(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(line), flush=True)


def dump(
    args: argparse.Namespace, log_probs: list[Tensor], values: list[Tensor], norms: dict[str, float]
) -> None:
    """The same work? Answer tokens in the batch's order, and the norms of both gradients."""
    if args.dump:
        flat = {"logp": torch.cat(log_probs).float(), "value": torch.cat(values).float()}
        np.savez(args.dump, **{name: x.numpy() for name, x in flat.items()}, **norms)


def gradient_norm(model: torch.nn.Module) -> float:
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
