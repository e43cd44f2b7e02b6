"""One measurement of `update.py`, in a process of its own: one JSON line with CPU seconds and peak memory.

    python benchmarks/update_run.py --model FOLDER --batch batch.npz --what '{"precision": "fast"}'

The batch is `peers/make_batch.py`'s: trajectories with old log-probs, values, advantages and returns. What
is timed is what the learner does with one mini-batch of all its rows, critic then actor, forward and
backward; of an optimizer's step, only that it drops the gradients. `--what` turns techniques off or on:
{"share": false, "head": "chunks", "steps": false, "budget": 4096, "n": 8, "score": true,
"keep_memory": false, "checkpointing": true, "compile": true, "logits_chunk": 4194304}. Compiling is not
timed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rein.config.recipe import Recipe
from rein.experience import in_micro_batches, padded
from rein.learner import Learner
from rein.models.actor import Actor, load_actor
from rein.models.critic import Critic, load_critic
from rein.models.elementwise import compile_steps
from rein.models.flops import Flops
from rein.runtime.memory import keep_few_kernels, keep_freed_memory
from rein.runtime.single import SingleMesh
from rein.types import Experience, Trajectory, Update

CLIP, BUDGET = 0.2, 2048
PEAK_SHAPES = ((1024, 576, 1536), (1024, 1536, 576), (2048, 2048, 2048))  # positions, in, out


def rows_of(batch: Any, *, limit: int, n: int | None) -> list[Trajectory]:
    """The stored trajectories; with `n`, every n of them answer the first one's prompt."""
    ends_p, ends_r = np.cumsum(batch["plen"]), np.cumsum(batch["rlen"])
    count = min(limit or len(ends_p), len(ends_p))
    found = []
    for i in range(count):
        p = i if n is None else i - i % n
        prompt = batch["prompt"][ends_p[p] - batch["plen"][p] : ends_p[p]].astype(np.int64)
        response = batch["resp"][ends_r[i] - batch["rlen"][i] : ends_r[i]].astype(np.int64)
        mask = np.ones(len(response), dtype=np.bool_)
        found.append(Trajectory(f"row {i}", "", prompt, response, mask, group=str(p)))
    return found


def experience_of(batch: Any, rows: list[Trajectory]) -> Experience:
    ends = np.cumsum(batch["rlen"])

    def stored(name: str) -> Tensor:
        parts = [batch[name][ends[i] - batch["rlen"][i] : ends[i]] for i in range(len(rows))]
        return padded(parts, torch.float32)

    return Experience(
        rows=rows,
        response_mask=padded([row.response_mask for row in rows], torch.bool),
        temperature=torch.ones(len(rows), dtype=torch.float64),
        old_log_probs=stored("old_logp"),
        advantages=stored("adv"),
        values=stored("values"),
        returns=stored("ret"),
    )


def learner_of(model: str, rows: int, what: dict[str, Any]) -> Learner:
    recipe = Recipe.model_validate(
        {
            "model": {
                "path": model,
                "precision": what.get("precision", "exact"),
                "enable_gradient_checkpointing": what.get("checkpointing", False),
            },
            "actor": {
                "ppo_mini_batch_size": rows,
                "ppo_max_token_len_per_gpu": what.get("budget", BUDGET),
                "use_kl_loss": False,
                "clip_ratio_c": 1000.0,
            },
        }
    )
    options: dict[str, Any] = {
        "precision": recipe.model.precision,
        "enable_gradient_checkpointing": recipe.model.enable_gradient_checkpointing,
    }
    if what.get("compile"):
        compile_steps()
    actor, critic = load_actor(model, **options), load_critic(model, **options)
    actor.logits_chunk = what.get("logits_chunk", actor.logits_chunk)
    with torch.no_grad():
        critic.model.score.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(2))
    actor.shares_prompts = critic.shares_prompts = what.get("share", True)
    if what.get("head") == "chunks":
        actor.plain_head = None
    if not what.get("steps", True):
        for module in (*actor.model.modules(), *critic.model.modules()):
            for replaced in ("forward", "product"):
                module.__dict__.pop(replaced, None)
    return Learner(
        recipe, actor, critic, SingleMesh(),
        kl_coef_in_loss=0.0, kl_coef_in_reward=0.0, actor_steps=1, critic_steps=1,
    )  # fmt: skip


def update(learner: Learner, experience: Experience, *, apply: bool = False, forget: bool = False) -> None:
    """Critic, then actor, all rows as one mini-batch; `apply`: with the optimizer's step; `forget`: without,
    its gradients dropped as a step does.
    """
    for role in ("critic", "actor"):
        learner.backward(Update(role, tuple(range(len(experience.rows))), 0), experience)
        if apply:
            learner.apply(role)
        if forget:
            learner.forget(role)


def score(learner: Learner, experience: Experience) -> tuple[Tensor, Tensor]:
    """What a scoring pass says: log-probs and values."""
    actor, critic = learner.actor, learner.critic
    assert isinstance(actor, Actor)
    assert isinstance(critic, Critic)
    rows, budget, share = experience.rows, learner.token_budget, actor.shares_prompts
    log_probs = in_micro_batches(rows, budget, lambda some, temp: actor.log_probs(some, temp)[0], share=share)
    return log_probs, in_micro_batches(rows, budget, lambda some, _: critic.values(some), share=share)


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of the quickest matrix product of one thread."""
    best = 0.0
    for m, k, n in PEAK_SHAPES:
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        linear(x, w)
        for _ in range(5):
            began = time.process_time()
            for _ in range(4):
                linear(x, w)
            best = max(best, 4 * 2 * m * k * n / (time.process_time() - began))
    return best


def useful_flops(learner: Learner, rows: list[Trajectory], *, backward: bool) -> float:
    """Of both roles: real tokens, the head at response positions, nothing off for what is shared."""
    models = [role.model for role in (learner.actor, learner.critic) if role is not None]
    return sum(Flops(model).update(rows) if backward else Flops(model).forward(rows) for model in models)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    what = json.loads(args.what)
    keep_few_kernels()
    if what.get("keep_memory", True):
        keep_freed_memory()
    batch = np.load(args.batch)
    rows = rows_of(batch, limit=args.limit, n=what.get("n"))
    experience, learner = experience_of(batch, rows), learner_of(args.model, len(rows), what)
    scores = bool(what.get("score"))
    if what.get("compile"):
        some = experience_of(batch, rows[:4])
        score(learner, some) if scores else update(learner, some)
        for role in learner.optimizers:
            learner.forget(role)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began, clock = time.process_time(), time.perf_counter()
    score(learner, experience) if scores else update(learner, experience, forget=True)
    spent, wall = time.process_time() - began, time.perf_counter() - clock
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    fast = what.get("precision") == "fast"
    top = peak(torch.bfloat16 if fast else torch.float32)
    return {
        "what": what,
        "cpu_seconds": round(spent, 3),
        "seconds": round(wall, 3),
        "tokens": tokens,
        "tokens_per_cpu_second": round(tokens / spent, 1),
        "peak_rss_mb": round(rss),
        "rss_before_mb": round(before),
        "peak_gflops": round(top / 1e9),
        "mfu": round(useful_flops(learner, rows, backward=not scores) / (spent * top), 3),
    }


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """How far log-probs and gradients are from a loop over the rows in the model's own forward."""
    what = json.loads(args.what)
    batch = np.load(args.batch)
    rows = rows_of(batch, limit=args.limit, n=what.get("n"))
    experience, learner = experience_of(batch, rows), learner_of(args.model, len(rows), what)
    update(learner, experience)
    log_probs, _ = score(learner, experience)
    torch.set_float32_matmul_precision("highest")
    assert isinstance(learner.critic, Critic)
    head = learner.critic.model.score.weight.detach()
    policy, value, said = naive(args.model, experience, head)
    if args.dump:
        np.savez(args.dump, logp=said[experience.response_mask].numpy())
    roles = {"actor": (learner.actor.model, policy), "critic": (learner.critic.model, value)}
    found: dict[str, Any] = {"what": what}
    gap = (log_probs - said).abs()[experience.response_mask]
    found["log_prob_error_max"], found["log_prob_error_mean"] = gap.max().item(), gap.mean().item()
    for role, (own, other) in roles.items():
        grads = dict(other.named_parameters())
        errors = {
            name: ((p.grad - grads[name].grad).norm() / grads[name].grad.norm()).item()
            for name, p in own.named_parameters()
            if p.grad is not None
        }
        worst = max(errors, key=lambda name: errors[name])
        found |= {f"{role}_gradient_error_max": errors[worst], f"{role}_worst": worst}
    return found


def naive(model: str, e: Experience, head: Tensor) -> tuple[torch.nn.Module, torch.nn.Module, Tensor]:
    """Both models with their gradients, and the log-probs, of a loop without packing."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    value = AutoModelForSequenceClassification.from_pretrained(
        model, dtype=torch.float32, attn_implementation="sdpa", num_labels=1
    )
    value.score.weight.data.copy_(head)
    tokens = int(e.response_mask.sum())
    assert e.values is not None
    assert e.returns is not None
    said = torch.zeros_like(e.old_log_probs)
    for i, row in enumerate(e.rows):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))[None]
        begin, length = len(row.prompt_ids), len(row.response_ids)
        log_p = policy(input_ids=ids).logits[0, begin - 1 : -1].log_softmax(-1)
        own = log_p.gather(1, ids[0, begin:, None]).squeeze(1)
        said[i, :length] = own.detach()
        ratio, advantage = (own - e.old_log_probs[i, :length]).exp(), e.advantages[i, :length]
        loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
        states = value.model(input_ids=ids).last_hidden_state
        v, old, target = (
            value.score(states)[0, begin - 1 : -1, 0],
            e.values[i, :length],
            e.returns[i, :length],
        )
        near = torch.minimum(torch.maximum(v, old - CLIP), old + CLIP)
        loss = loss + 0.5 * torch.max((v - target) ** 2, (near - target) ** 2).sum()
        (loss / tokens).backward()
    return policy, value, said


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--what", default="{}")
    parser.add_argument("--dump", type=Path, help="an .npz for the loop's log-probs")
    parser.add_argument("--compare", action="store_true")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = parser.parse_args()
    print(json.dumps(compared(args) if args.compare else measured(args)), flush=True)
