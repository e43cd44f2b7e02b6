"""OpenRLHF 0.11.2's update: its Actor, PolicyLoss and ValueLoss, one JSON line.

    python benchmarks/peers/openrlhf_update.py --model runs/smollm2 --batch batch.npz --dtype bf16 --micro 2

As its own batching does, rows are padded on the right to the longest of their micro-batch; its packed rows
need flash_attn, which needs CUDA. Entropy is not computed: it is not by default. Its modules import
flash_attn and deepspeed, and use neither here: empty modules stand in. `bf16` is autocast over float32
weights, `bf16-weights` holds weights and gradients in bfloat16, as under DeepSpeed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from common import (
    CLIP,
    VALUE_CLIP,
    Batch,
    autocast,
    dump,
    gradient_norm,
    load_models,
    options,
    parsed,
    report,
    timed,
)
from torch import Tensor

STORED = ("old_logp", "values", "adv", "ret")


def stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(members)
    sys.modules[name] = module


def openrlhf() -> tuple[Any, Any, Any]:
    """Three classes of the installed package, without the imports of its __init__ files (ray, vllm)."""

    def unused(*_: Any) -> None:
        raise AssertionError("flash_attn is not used on padded rows")

    names = ("index_first_axis", "pad_input", "rearrange", "unpad_input")
    for name in ("flash_attn", "flash_attn.utils", "deepspeed"):
        stand_in(name)
    stand_in("flash_attn.bert_padding", **dict.fromkeys(names, unused))
    stand_in("flash_attn.utils.distributed", all_gather=unused)
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        raise SystemExit("openrlhf: not installed; run `pip install --no-deps openrlhf==0.11.2`")
    folder = Path(spec.origin).parent
    stand_in("openrlhf", __path__=[str(folder)])
    stand_in("openrlhf.models", __path__=[str(folder / "models")])
    from openrlhf.models.actor import Actor
    from openrlhf.models.loss import PolicyLoss, ValueLoss

    return Actor, PolicyLoss, ValueLoss


def micro_batch(batch: Batch, rows: range) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Ids, attention mask, and for positions 0 to L - 2 the mask of answers and what is stored for them."""
    longest = max(batch.prompt_lengths[i] + batch.lengths[i] for i in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    attended, answers = torch.zeros_like(ids), torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    stored = {name: torch.zeros(answers.shape) for name in STORED}
    for row, i in enumerate(rows):
        begin, length = batch.prompt_lengths[i], batch.lengths[i]
        ids[row, : begin + length] = torch.cat([batch.prompts[i], batch.responses[i]])
        attended[row, : begin + length] = 1
        answers[row, begin - 1 : begin + length - 1] = True
        for name, padded in stored.items():
            padded[row, begin - 1 : begin + length - 1] = batch.stored[name][i]
    return ids, attended, answers, stored


def first(loss: Any) -> Tensor:
    found: Tensor = loss[0] if isinstance(loss, tuple) else loss
    return found


def main() -> None:
    parser = options()
    parser.add_argument("--dtype", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    parser.add_argument("--micro", type=int, default=2, help="rows of a micro-batch")
    args = parsed(parser)
    batch = Batch(args.batch, args.limit)
    dtype = torch.bfloat16 if args.dtype == "bf16-weights" else torch.float32
    policy, critic = load_models(args.model, dtype)  # transformers looks for deepspeed: before the stand-ins
    actor_class, policy_loss_class, value_loss_class = openrlhf()
    actor = actor_class(policy)
    actor.packing_samples, actor.temperature = False, 1.0
    policy_loss = policy_loss_class(clip_eps_low=CLIP, clip_eps_high=CLIP)
    value_loss = value_loss_class(VALUE_CLIP)
    log_probs: list[Tensor] = []
    values: list[Tensor] = []

    def work() -> None:
        log_probs.clear()
        values.clear()
        for begin in range(0, batch.n, args.micro):
            ids, attended, answers, e = micro_batch(batch, range(begin, min(begin + args.micro, batch.n)))
            positions = (attended.cumsum(1) - 1).clamp(min=0)
            with torch.set_grad_enabled(not args.score), autocast(args.dtype):
                said, _ = actor(
                    ids, answers, attention_mask=attended, return_output=True, return_entropy=False
                )
                states = critic.model(ids, attention_mask=attended, position_ids=positions).last_hidden_state
                value = critic.score(states)[:, :-1, 0].float()
            log_probs.append(said.detach()[answers])
            values.append(value.detach()[answers])
            if args.score:
                continue
            share = answers.sum() / batch.response_tokens  # makes it one mean over all tokens
            loss = first(policy_loss(said, e["old_logp"], e["adv"], action_mask=answers))
            (loss * share).backward()
            loss = first(value_loss(value, e["values"], e["ret"], action_mask=answers))
            (loss * share).backward()

    found = timed(work, args.repeats)
    norms = {"actor_norm": gradient_norm(policy), "critic_norm": gradient_norm(critic)}
    report("OpenRLHF 0.11.2", args, batch, found | {"dtype": args.dtype, "micro": args.micro} | norms)
    dump(args, log_probs, values, norms)


if __name__ == "__main__":
    main()
