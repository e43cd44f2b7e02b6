"""Stored data with a known fault, twelve kinds of them, made with the demo's model: what an audit must see.

Each kind's parameters are drawn from a seed. A maker takes the world (the start policy, an earlier state of
it, the prompts) and gives the rows of a trajectories file, with what was drawn.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rein.config.recipe import RewardSpec
from rein.engines.hf import HfEngine
from rein.experience import in_micro_batches
from rein.models.actor import Actor
from rein.rewards import build
from rein.types import Prompt, Trajectory

N = 8  # answers to a prompt
TRUTH = build([RewardSpec(name="exact", options={"marker": "#"})], scorer=None)
BUDGET = 8192
Made = tuple[list[Trajectory], dict[str, Any]]  # rows, and what was drawn


@dataclass(frozen=True)
class World:
    """What all kinds of a seed share."""

    actor: Actor  # the start policy
    earlier: Actor  # the same in an earlier state
    prompts: Sequence[Prompt]
    test: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]


def sampled(
    world: World,
    seed: int,
    *,
    writer: Actor | None = None,
    prompts: Sequence[Prompt] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[Trajectory]:
    """Answers with the log-probs of the full softmax at the sampling temperature, scored by the truth."""
    writer, prompts = writer or world.actor, world.prompts if prompts is None else prompts
    engine = HfEngine(writer.model, writer.tokenizer, writer.stop_ids, batch_size=512)
    answers = engine.generate(
        prompts, n=N, temperature=temperature, top_p=top_p, max_new_tokens=48, seed=seed
    )
    rows = []
    for prompt, completions in zip(prompts, answers, strict=True):
        for completion in completions:
            text = world.decode(completion.response_ids.tolist())
            rows.append(
                Trajectory(
                    where=prompt.where,
                    messages=prompt.messages,
                    prompt_ids=prompt.prompt_ids,
                    response_ids=completion.response_ids,
                    response_mask=np.ones(len(completion.response_ids), dtype=np.bool_),
                    response=text,
                    behavior_log_probs=completion.log_probs,
                    finish_reason=completion.finish_reason,
                    temperature=temperature,
                    group=prompt.text,
                    behavior_policy="writer",
                    ground_truth=prompt.ground_truth,
                )
            )
    return [row.with_score(score) for row, score in zip(rows, TRUTH(rows), strict=True)]


def with_log_probs(rows: Sequence[Trajectory], actor: Actor, temperature: float = 1.0) -> list[Trajectory]:
    """The rows with this model's log-probs in place of the writer's."""
    stated = [dataclasses.replace(row, temperature=temperature) for row in rows]
    found = in_micro_batches(stated, BUDGET, lambda part, temp: actor.log_probs(part, temp)[0])
    return [
        dataclasses.replace(row, behavior_log_probs=found[i, : len(row.response_ids)].float().numpy())
        for i, row in enumerate(stated)
    ]


def fresh(world: World, rng: random.Random) -> Made:
    """The start policy's own answers."""
    return sampled(world, rng.randrange(2**31)), {}


def good(world: World, rng: random.Random) -> Made:
    """A somewhat colder policy's answers, with its log-probs: an importance weight makes them right."""
    temperature = rng.uniform(0.85, 0.95)
    rows = sampled(world, rng.randrange(2**31), temperature=temperature)
    return [dataclasses.replace(row, temperature=1.0) for row in rows], {"temperature": temperature}


def stale(world: World, rng: random.Random) -> Made:
    """An earlier state of the policy wrote them, and its log-probs are there."""
    return sampled(world, rng.randrange(2**31), writer=world.earlier), {}


def wrong_model(world: World, rng: random.Random) -> Made:
    """The start policy wrote them; the log-probs are another model's."""
    return with_log_probs(sampled(world, rng.randrange(2**31)), world.earlier), {}


def wrong_temperature(world: World, rng: random.Random) -> Made:
    """Sampled colder or hotter than the file says; the log-probs are those at the temperature it says."""
    temperature = rng.choice([rng.uniform(0.5, 0.75), rng.uniform(1.3, 1.5)])
    rows = sampled(world, rng.randrange(2**31), temperature=temperature)
    return with_log_probs(rows, world.actor), {"temperature": temperature}


def top_p_cut(world: World, rng: random.Random) -> Made:
    """Sampled from a nucleus; the log-probs are the full distribution's, or divided by the nucleus' mass."""
    top_p, renormalised = rng.uniform(0.7, 0.9), rng.random() < 0.5
    rows = sampled(world, rng.randrange(2**31), top_p=top_p)
    if renormalised:
        rows = [_renormalised(world.actor, row, top_p) for row in rows]
    return rows, {"top_p": top_p, "renormalised": renormalised}


def _renormalised(actor: Actor, row: Trajectory, top_p: float) -> Trajectory:
    def mass(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(logits / temperature.unsqueeze(-1), -1).sort(-1, descending=True).values
        return p.where(p.cumsum(-1) - p < top_p, 0).sum(-1)[None]

    kept = actor.over_logits([row], torch.ones(1, dtype=torch.float64), mass)[0, 0, : len(row.response_ids)]
    assert row.behavior_log_probs is not None
    return dataclasses.replace(row, behavior_log_probs=row.behavior_log_probs - kept.log().float().numpy())


def reward_noise(world: World, rng: random.Random) -> Made:
    """A share of the verdicts is the other one."""
    share = rng.uniform(0.2, 0.35)
    rows = sampled(world, rng.randrange(2**31))
    return [row.with_score(1 - (row.score or 0) if rng.random() < share else row.score) for row in rows], {
        "share": share
    }


def length_bias(world: World, rng: random.Random) -> Made:
    """Longer answers score higher, right or wrong."""
    weight = rng.uniform(1.0, 3.0) * rng.choice([-1, 1])
    rows = sampled(world, rng.randrange(2**31))
    lengths = np.array([len(row.response_ids) for row in rows], dtype=float)
    extra = weight * (lengths - lengths.mean()) / lengths.std()
    return [row.with_score((row.score or 0) + e) for row, e in zip(rows, extra.tolist(), strict=True)], {
        "weight": weight
    }


def duplicated(world: World, rng: random.Random) -> Made:
    """Most rows are copies of a few."""
    share = rng.uniform(0.5, 0.7)
    rows = sampled(world, rng.randrange(2**31))
    kept = rng.sample(rows, int(len(rows) * (1 - share)))
    few = rng.sample(kept, max(len(kept) // 8, 1))
    return kept + [rng.choice(few) for _ in range(len(rows) - len(kept))], {"share": share}


def leaked(world: World, rng: random.Random) -> Made:
    """Some of the prompts are those of the evaluation."""
    share = rng.uniform(0.1, 0.4)
    n = int(len(world.prompts) * share)
    prompts = [*world.prompts[n:], *rng.sample(list(world.test), min(n, len(world.test)))]
    return sampled(world, rng.randrange(2**31), prompts=prompts), {"share": share}


def no_spread(world: World, rng: random.Random) -> Made:
    """Every answer scores the same."""
    score = rng.choice([0.0, 1.0])
    return [row.with_score(score) for row in sampled(world, rng.randrange(2**31))], {"score": score}


def too_few(world: World, rng: random.Random) -> Made:
    """A handful of prompts."""
    n = rng.randrange(3, 9)
    return sampled(world, rng.randrange(2**31), prompts=world.prompts[:n]), {"prompts": n}


KINDS: dict[str, Callable[[World, random.Random], Made]] = {
    "fresh": fresh,
    "stale": stale,
    "wrong model": wrong_model,
    "wrong temperature": wrong_temperature,
    "top-p cut": top_p_cut,
    "reward noise": reward_noise,
    "length-biased reward": length_bias,
    "duplicated": duplicated,
    "leaked": leaked,
    "no spread": no_spread,
    "too few": too_few,
    "good": good,
}
