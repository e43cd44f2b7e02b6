"""verl 0.9.1's update: actor, then critic, each by its TrainingWorker; one JSON line.

    python benchmarks/peers/verl_update.py --model runs/smollm2 --batch batch.npz --dtype bf16 --budget 1024

One mini-batch is the whole batch, packed (remove_padding) into micro-batches of a token budget, on its FSDP2
engine over gloo with sdpa; entropy and the KL term off. `--score` is `infer_batch` of both. No Ray, no
generation. Its mini-batch ends with clipping and AdamW, whose time and memory are left out, as the others
have none; AdamW's state is dropped after each step for the same reason. The learning rate is 0.
`bf16` computes on bfloat16 copies of float32 weights, its default; `bf16-weights` also holds the weights so
(`model_dtype`). `--loop` is the whole job in the order of RayPPOTrainer.fit: old log-probs (with entropy, as
there), reference, values, advantages, one epoch of the critic, one of the actor with a KL loss, AdamW as it
is; then a Hugging Face folder. Its reference is a third such worker: the one it has for that pins memory, for
CUDA.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
import verl_platform  # noqa: F401  before the rest of verl
from common import (
    CLIP,
    GAMMA,
    KL_COEF,
    LAM,
    LR,
    PEAK,
    VALUE_CLIP,
    Batch,
    Phases,
    dump,
    options,
    parsed,
    report,
    seconds,
)
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.core_algos import compute_gae_advantage_return
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
    """A TrainingWorker whose optimizer step, but for the whole job, is timed apart."""

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
        how = {"lr": LR} if args.loop else {"lr": 0.0, "weight_decay": 0.0}
        optimizer = FSDPOptimizerConfig(**how, total_training_steps=1000)
        config = TrainingWorkerConfig(
            model_type="value_model" if role == "critic" else "language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(save_contents=["hf_model"]),
        )
        self.worker = TrainingWorker(config)
        self.worker.reset()
        self.worker.set_loss_fn(loss_of(role, model, optimizer, kl=bool(args.loop)))
        if not args.loop:
            self.step = self.worker.engine.optimizer_step
            self.worker.engine.optimizer_step = self.timed_step

    def timed_step(self) -> Any:
        began, clock = time.process_time(), time.perf_counter()
        with PEAK.left_out():
            found = self.step()
            self.worker.engine.optimizer.state.clear()
        self.optimizer_cpu += time.process_time() - began
        self.optimizer_wall += time.perf_counter() - clock
        return found


def loss_of(role: str, model: HFModelConfig, optimizer: FSDPOptimizerConfig, *, kl: bool) -> Any:
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
    some |= {"kl_loss_coef": KL_COEF, "kl_loss_type": "low_var_kl"} if kl else {}
    return partial(ppo_loss, config=FSDPActorConfig(use_kl_loss=kl, entropy_coeff=0.0, **some))


def data(batch: Batch, more: dict[str, list[Tensor]]) -> TensorDict:
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
    stored = {name: nested(parts) for name, parts in more.items()}
    return TensorDict(found | stored, batch_size=batch.n)


OURS = {  # the stored batch's names
    "actor": {"old_log_probs": "old_logp", "ref_log_prob": "ref_logp", "advantages": "adv"},
    "critic": {"values": "values", "returns": "ret"},
}


def update(worker: Worker, batch: Batch, known: dict[str, list[Tensor]], mini: int) -> float:
    """One epoch over mini-batches; the last gradient's norm."""
    rows = data(batch, {name: known[name] for name in OURS[worker.role]})
    some = {"global_batch_size": mini, "mini_batch_size": mini, "epochs": 1, "seed": 42}
    some |= {"temperature": 1.0, "calculate_entropy": False, "dataloader_kwargs": {"shuffle": False}}
    tensordict_utils.assign_non_tensor(rows, **some)
    norm = tensordict_utils.get(worker.worker.train_mini_batch(rows), "metrics")["grad_norm"]
    return float(norm[-1] if isinstance(norm, list) else norm)


def score(worker: Worker, batch: Batch, *, entropy: bool = False) -> list[Tensor]:
    rows = data(batch, {})
    some = {"temperature": 1.0, "calculate_entropy": entropy, "compute_loss": False}
    tensordict_utils.assign_non_tensor(rows, global_batch_size=batch.n, **some)
    found = worker.worker.infer_batch(rows)["values" if worker.role == "critic" else "log_probs"]
    mask = nested([torch.ones(length) for length in batch.lengths])
    return list(response_from_nested(found, mask).unbind())


def advantages(batch: Batch, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Its GAE, with the score on an answer's last token: advantages and returns."""
    shape = (batch.n, max(batch.lengths))
    rewards, mask = torch.zeros(shape), torch.zeros(shape)
    for i, length in enumerate(batch.lengths):
        rewards[i, length - 1] = batch.scores[i]
        mask[i, :length] = 1
    padded = torch.nn.utils.rnn.pad_sequence([part.float() for part in values], batch_first=True)
    both = compute_gae_advantage_return(rewards, padded, mask, GAMMA, LAM)
    return tuple([row[:length] for row, length in zip(x, batch.lengths, strict=True)] for x in both)


def whole_job(args: argparse.Namespace, batch: Batch) -> dict[str, Any]:
    """As RayPPOTrainer.fit does one step; phases by its names."""
    workers = {role: Worker(role, args) for role in ("actor", "critic", "reference")}
    phases, known = Phases(), {}
    mini = min(args.mini, batch.n)
    with phases("old_log_prob"):
        known["old_log_probs"] = score(workers["actor"], batch, entropy=True)
    with phases("ref"):
        known["ref_log_prob"] = score(workers["reference"], batch)
    with phases("values"):
        known["values"] = score(workers["critic"], batch)
    with phases("adv"):
        known["advantages"], known["returns"] = advantages(batch, known["values"])
    norms = {}
    for role in ("critic", "actor"):
        with phases(f"update_{role}"):
            norms[f"{role}_norm"] = update(workers[role], batch, known, mini)
    with phases("save_checkpoint"):
        workers["actor"].worker.save_checkpoint(str(args.loop))
    return phases.found() | {"dtype": args.dtype, "budget": args.budget} | norms


def main() -> None:
    parser = options()
    parser.add_argument("--dtype", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    args = parsed(parser)
    batch = Batch(args.batch, args.limit)
    if args.loop:
        report("verl 0.9.1", args, batch, whole_job(args, batch))
        torch.distributed.destroy_process_group()
        return
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
                known = {name: batch.stored[ours] for name, ours in OURS[role].items()}
                norms[f"{role}_norm"] = update(worker, batch, known, batch.n)
        cpu.append(time.process_time() - began - sum(w.optimizer_cpu for w in workers.values()))
        wall.append(time.perf_counter() - clock - sum(w.optimizer_wall for w in workers.values()))
    found = seconds(cpu, wall) | {"dtype": args.dtype, "budget": args.budget} | norms
    found["optimizer_cpu_seconds"] = round(sum(w.optimizer_cpu for w in workers.values()), 3)
    report("verl 0.9.1", args, batch, found)
    dump(args, scores["actor"], scores["critic"], norms)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
