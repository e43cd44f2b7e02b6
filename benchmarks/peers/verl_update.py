"""verl 0.9.1's update: actor, then critic, each by its TrainingWorker; one JSON line.

    python benchmarks/peers/verl_update.py --model runs/smollm2 --batch batch.npz --dtype bf16 --budget 1024

One mini-batch is the whole batch, packed (remove_padding) into micro-batches of a token budget, on its FSDP2
engine over gloo with sdpa; entropy and the KL term off. `--score` is `infer_batch` of both. No Ray, no
generation. Its mini-batch ends with clipping and AdamW, which are timed apart and left out, as the others
have none; AdamW's state is dropped after each step for the same reason. The learning rate is 0.
`bf16` computes on bfloat16 copies of float32 weights, its default; `bf16-weights` also holds the weights so
(`model_dtype`).
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import verl_platform  # noqa: F401  before the rest of verl
from common import CLIP, VALUE_CLIP, Batch, dump, options, parsed, report, seconds
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import response_from_nested


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor([part.clone() for part in parts], layout=torch.jagged)


class Worker:
    """A TrainingWorker whose optimizer step is timed apart."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        self.role = role
        self.optimizer_cpu = self.optimizer_wall = 0.0
        model = HFModelConfig(
            path=args.model,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=True,
            enable_gradient_checkpointing=False,
        )
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="bf16" if args.dtype == "bf16-weights" else "fp32",
            mixed_precision={"param_dtype": args.dtype[:4], "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=args.budget,
            infer_max_token_len_per_gpu=args.budget,
            use_no_sync_for_gradient_accumulation=False,
        )
        optimizer = FSDPOptimizerConfig(lr=0.0, weight_decay=0.0, total_training_steps=1000)
        config = TrainingWorkerConfig(
            model_type="language_model" if role == "actor" else "value_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
        self.worker = TrainingWorker(config)
        self.worker.reset()
        self.worker.set_loss_fn(loss_of(role, model, optimizer))
        self.step = self.worker.engine.optimizer_step
        self.worker.engine.optimizer_step = self.timed_step

    def timed_step(self) -> Any:
        began, clock = time.process_time(), time.perf_counter()
        found = self.step()
        self.worker.engine.optimizer.state.clear()
        self.optimizer_cpu += time.process_time() - began
        self.optimizer_wall += time.perf_counter() - clock
        return found


def loss_of(role: str, model: HFModelConfig, optimizer: FSDPOptimizerConfig) -> Any:
    some: dict[str, Any] = {
        "strategy": "fsdp2",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "optim": optimizer,
    }
    if role == "critic":
        config = FSDPCriticConfig(model=model, cliprange_value=VALUE_CLIP, **some)
        return partial(value_loss, config=config)
    some |= {"clip_ratio": CLIP, "clip_ratio_low": CLIP, "clip_ratio_high": CLIP}
    return partial(ppo_loss, config=FSDPActorConfig(use_kl_loss=False, entropy_coeff=0.0, **some))


def data(batch: Batch, more: dict[str, str]) -> TensorDict:
    """The rows, with what is stored for their answers under verl's names."""
    rows = [torch.cat(pair) for pair in zip(batch.prompts, batch.responses, strict=True)]
    mask = nested([torch.ones(length) for length in batch.lengths])
    found = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "prompts": nested(batch.prompts),
        "responses": nested(batch.responses),
        "response_mask": mask,
        "loss_mask": mask,
    }
    stored = {theirs: nested(batch.stored[ours]) for theirs, ours in more.items()}
    return TensorDict(found | stored, batch_size=batch.n)


def update(worker: Worker, batch: Batch) -> float:
    """The gradient's norm."""
    actor = {"old_log_probs": "old_logp", "ref_log_prob": "ref_logp", "advantages": "adv"}
    rows = data(batch, actor if worker.role == "actor" else {"values": "values", "returns": "ret"})
    some = {"global_batch_size": batch.n, "mini_batch_size": batch.n, "epochs": 1, "seed": 42}
    some |= {"temperature": 1.0, "calculate_entropy": False, "dataloader_kwargs": {"shuffle": False}}
    tensordict_utils.assign_non_tensor(rows, **some)
    norm = tensordict_utils.get(worker.worker.train_mini_batch(rows), "metrics")["grad_norm"]
    return float(norm[-1] if isinstance(norm, list) else norm)


def score(worker: Worker, batch: Batch) -> list[Tensor]:
    rows = data(batch, {})
    some = {"temperature": 1.0, "calculate_entropy": False, "compute_loss": False}
    tensordict_utils.assign_non_tensor(rows, global_batch_size=batch.n, **some)
    found = worker.worker.infer_batch(rows)["log_probs" if worker.role == "actor" else "values"]
    mask = nested([torch.ones(length) for length in batch.lengths])
    return list(response_from_nested(found, mask).unbind())


def main() -> None:
    parser = options()
    parser.add_argument("--dtype", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    args = parsed(parser)
    batch = Batch(args.batch, args.limit)
    workers = {role: Worker(role, args) for role in ("actor", "critic")}
    norms: dict[str, float] = {}
    scores: dict[str, list[Tensor]] = {"actor": [], "critic": []}
    cpu, wall = [], []
    for _ in range(args.repeats):
        began, clock = time.process_time(), time.perf_counter()
        for role, worker in workers.items():
            worker.optimizer_cpu = worker.optimizer_wall = 0.0
            if args.score:
                scores[role] = score(worker, batch)
            else:
                norms[f"{role}_norm"] = update(worker, batch)
        cpu.append(time.process_time() - began - sum(w.optimizer_cpu for w in workers.values()))
        wall.append(time.perf_counter() - clock - sum(w.optimizer_wall for w in workers.values()))
    found = seconds(cpu, wall) | {"dtype": args.dtype, "budget": args.budget} | norms
    found["optimizer_cpu_seconds"] = round(sum(w.optimizer_cpu for w in workers.values()), 3)
    report("verl 0.9.1", args, batch, found)
    dump(args, scores["actor"], scores["critic"], norms)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
