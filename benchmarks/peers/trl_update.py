"""TRL 1.12.0's PPO update, the last release that has one: the inner loop of its PPOTrainer, one JSON line.

    python benchmarks/peers/trl_update.py --model runs/smollm2 --batch batch.npz --dtype bf16 --micro 4

Its forward, PolicyAndValueWrapper, selective_log_softmax and masked_mean in the order of PPOTrainer.train().
As there, prompts are padded on the left and answers on the right to the longest of the whole batch, and
entropy is computed without gradients. `bf16` is autocast over float32 weights, its default; `bf16-weights`
loads them in bfloat16, as its option `dtype` can. `--loop` is the whole job as in train(): old log-probs,
reference and values micro-batch by micro-batch, the KL in the reward, GAE, one epoch of mini-batches with
AdamW over both models, unclipped as there; then a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
from common import (
    CLIP,
    GAMMA,
    KL_COEF,
    LAM,
    LR,
    PER_TOKEN,
    VALUE_CLIP,
    VALUE_COEF,
    Batch,
    Phases,
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

INVALID = 1.0
PAD = 49151  # an id that no row may hold: the trainer takes its mask from it


def padded(batch: Batch) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Prompts, answers, the mask of what is no answer, and what is stored for the answers."""
    width, length = max(batch.prompt_lengths), max(batch.lengths)
    prompts = torch.full((batch.n, width), PAD)
    answers = torch.full((batch.n, length), PAD)
    stored = {name: torch.zeros(batch.n, length) for name in PER_TOKEN}
    for i, (prompt, answer) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        if PAD in prompt or PAD in answer:
            raise SystemExit(f"row {i}: holds id {PAD}, which is the padding; choose another")
        prompts[i, width - len(prompt) :] = prompt
        answers[i, : len(answer)] = answer
        for name, values in stored.items():
            values[i, : len(answer)] = batch.stored[name][i]
    return prompts, answers, answers == PAD, stored


class Trainer:
    """The two passes of PPOTrainer.train() over one padded batch."""

    def __init__(self, batch: Batch, policy: Any, critic: Any, dtype: str) -> None:
        from trl.experimental.ppo.ppo_trainer import PolicyAndValueWrapper

        self.batch, self.policy, self.critic, self.dtype = batch, policy, critic, dtype
        self.model = PolicyAndValueWrapper(policy, critic)
        prompts, self.answers, self.padding, self.stored = padded(batch)
        self.rows = torch.cat([prompts, self.answers], 1)
        self.width = prompts.shape[1]
        self.log_probs, self.values = torch.zeros(self.answers.shape), torch.zeros(self.answers.shape)

    def update(self, some: Any, tokens: int) -> None:
        """Gradients of rows of a mini-batch that has so many answer tokens."""
        from trl.experimental.ppo.ppo_trainer import forward, masked_mean
        from trl.trainer.utils import selective_log_softmax

        padding, e = self.padding[some], {name: x[some] for name, x in self.stored.items()}
        with autocast(self.dtype):
            output, predicted = forward(self.model, self.rows[some], PAD)
        logits = output.logits.float()[:, self.width - 1 : -1]
        logits /= 1.0 + 1e-7
        said = selective_log_softmax(logits, self.answers[some].masked_fill(padding, 0))
        said = said.masked_fill(padding, INVALID)
        value = predicted[:, self.width - 1 : -1].squeeze(-1).float().masked_fill(padding, 0)
        near = torch.clamp(value, e["values"] - VALUE_CLIP, e["values"] + VALUE_CLIP)
        worse = torch.max((value - e["ret"]) ** 2, (near - e["ret"]) ** 2)
        value_loss = 0.5 * masked_mean(worse, ~padding)
        ratio = torch.exp(said - e["old_logp"].masked_fill(padding, INVALID))
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy_loss = masked_mean(torch.max(-e["adv"] * ratio, -e["adv"] * clipped), ~padding)
        share = (~padding).sum() / tokens  # makes it one mean over all tokens
        ((policy_loss + VALUE_COEF * value_loss) * share).backward()
        with torch.no_grad():
            chances = torch.nn.functional.softmax(logits, dim=-1)
            torch.logsumexp(logits, dim=-1) - torch.sum(chances * logits, dim=-1)
        self.log_probs[some], self.values[some] = said.detach(), value.detach()

    @torch.no_grad()
    def said(self, policy: Any, some: slice) -> Tensor:
        from trl.experimental.ppo.ppo_trainer import forward
        from trl.trainer.utils import selective_log_softmax

        with autocast(self.dtype):
            output = forward(policy, self.rows[some], PAD)
        logits = output.logits[:, self.width - 1 : -1].float()
        logits /= 1.0 + 1e-7
        return selective_log_softmax(logits, self.answers[some].masked_fill(self.padding[some], 0))

    @torch.no_grad()
    def value(self, some: slice) -> Tensor:
        from trl.experimental.utils import get_reward

        with autocast(self.dtype):
            predicted, _, _ = get_reward(self.critic, self.rows[some], PAD, self.width)
        return predicted[:, self.width - 1 : -1].squeeze(-1).float()

    def score(self, some: slice) -> None:
        self.log_probs[some], self.values[some] = self.said(self.policy, some), self.value(some)

    @torch.no_grad()
    def advantages(self) -> None:
        """Steps 4 to 6 of train(): KL in the reward, GAE, whitening; rewards are not whitened by default."""
        from trl.experimental.ppo.ppo_trainer import masked_whiten

        e, padding = self.stored, self.padding
        old, reference = (e[name].masked_fill(padding, INVALID) for name in ("old_logp", "ref_logp"))
        values = e["values"].masked_fill(padding, 0)
        rewards = -KL_COEF * (old - reference)
        rewards[torch.arange(self.batch.n), torch.tensor(self.batch.lengths) - 1] += torch.tensor(
            self.batch.scores
        )
        last, found = 0, []
        for t in reversed(range(rewards.shape[1])):
            following = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
            delta = rewards[:, t] + GAMMA * following - values[:, t]
            last = delta + GAMMA * LAM * last
            found.append(last)
        advantages = torch.stack(found[::-1], dim=1)
        e["values"], e["ret"] = values, advantages + values
        e["adv"] = masked_whiten(advantages, ~padding).masked_fill(padding, 0)


def whole_job(args: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    from trl.experimental.utils import create_reference_model

    reference, phases, e = create_reference_model(trainer.policy), Phases(), trainer.stored
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    for begin in range(0, trainer.batch.n, args.micro):
        some = slice(begin, begin + args.micro)
        with phases("old_log_prob"):
            e["old_logp"][some] = trainer.said(trainer.policy, some)
        with phases("ref"):
            e["ref_logp"][some] = trainer.said(reference, some)
        with phases("values"):
            e["values"][some] = trainer.value(some)
    with phases("adv"):
        trainer.advantages()
    with phases("update_actor_and_critic"):
        order = torch.randperm(trainer.batch.n)
        for mini in order.split(args.mini):
            tokens = int((~trainer.padding[mini]).sum())
            for some in mini.split(args.micro):
                trainer.update(some, tokens)
            optimizer.step()
            optimizer.zero_grad()
    with phases("save_checkpoint"):
        trainer.policy.save_pretrained(args.loop)
    return phases.found() | {"dtype": args.dtype, "micro": args.micro}


def main() -> None:
    warnings.filterwarnings("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    parser = options()
    parser.add_argument("--dtype", choices=["fp32", "bf16", "bf16-weights"], default="fp32")
    parser.add_argument("--micro", type=int, default=4, help="rows of a micro-batch")
    args = parsed(parser)
    batch = Batch(args.batch, args.limit)
    dtype = torch.bfloat16 if args.dtype == "bf16-weights" else torch.float32
    policy, critic = load_models(args.model, dtype)
    trainer = Trainer(batch, policy, critic, args.dtype)
    if args.loop:
        report("TRL 1.12.0 PPO", args, batch, whole_job(args, trainer))
        return

    def work() -> None:
        for begin in range(0, batch.n, args.micro):
            some = slice(begin, begin + args.micro)
            trainer.score(some) if args.score else trainer.update(some, batch.response_tokens)

    found = timed(work, args.repeats)
    norms = {"actor_norm": gradient_norm(policy), "critic_norm": gradient_norm(critic)}
    found |= {"dtype": args.dtype, "micro": args.micro}
    report("TRL 1.12.0 PPO", args, batch, found | norms)
    dump(args, [trainer.log_probs[~trainer.padding]], [trainer.values[~trainer.padding]], norms)


if __name__ == "__main__":
    main()
