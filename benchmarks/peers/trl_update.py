"""TRL 1.12.0's PPO update, the last release that has one: the inner loop of its PPOTrainer, one JSON line.

    python benchmarks/peers/trl_update.py --model runs/smollm2 --batch batch.npz --dtype bf16 --micro 4

Its forward, PolicyAndValueWrapper, selective_log_softmax and masked_mean in the order of PPOTrainer.train().
As there, prompts are padded on the left and answers on the right to the longest of the whole batch, and
entropy is computed without gradients. `bf16` is autocast over float32 weights, its default; `bf16-weights`
loads them in bfloat16, as its option `dtype` can.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from common import (
    CLIP,
    PER_TOKEN,
    VALUE_CLIP,
    VALUE_COEF,
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

    def update(self, some: slice) -> None:
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
        share = (~padding).sum() / self.batch.response_tokens  # makes it one mean over all tokens
        ((policy_loss + VALUE_COEF * value_loss) * share).backward()
        with torch.no_grad():
            chances = torch.nn.functional.softmax(logits, dim=-1)
            torch.logsumexp(logits, dim=-1) - torch.sum(chances * logits, dim=-1)
        self.log_probs[some], self.values[some] = said.detach(), value.detach()

    @torch.no_grad()
    def score(self, some: slice) -> None:
        from trl.experimental.ppo.ppo_trainer import forward
        from trl.experimental.utils import get_reward
        from trl.trainer.utils import selective_log_softmax

        with autocast(self.dtype):
            output = forward(self.policy, self.rows[some], PAD)
        logits = output.logits[:, self.width - 1 : -1].float()
        logits /= 1.0 + 1e-7
        answers = self.answers[some].masked_fill(self.padding[some], 0)
        self.log_probs[some] = selective_log_softmax(logits, answers)
        with autocast(self.dtype):
            predicted, _, _ = get_reward(self.critic, self.rows[some], PAD, self.width)
        self.values[some] = predicted[:, self.width - 1 : -1].squeeze(-1).float()


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

    def work() -> None:
        for begin in range(0, batch.n, args.micro):
            some = slice(begin, begin + args.micro)
            trainer.score(some) if args.score else trainer.update(some)

    found = timed(work, args.repeats)
    norms = {"actor_norm": gradient_norm(policy), "critic_norm": gradient_norm(critic)}
    found |= {"dtype": args.dtype, "micro": args.micro}
    report("TRL 1.12.0 PPO", args, batch, found | norms)
    dump(args, [trainer.log_probs[~trainer.padding]], [trainer.values[~trainer.padding]], norms)


if __name__ == "__main__":
    main()
