"""Held-out quality of a policy: prompts in, generated answers, their scores and what they look like out.

Engine, reward and decoding are passed in, so train and evaluate measure in the same way. Knows no model, no
file and no recipe.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rein.functional.evaluation import repetition
from rein.protocols import Reward, RolloutEngine
from rein.runtime.clock import Clock
from rein.types import Completion, Ids, Metrics, Prompt, Trajectory

Decode = Callable[[Ids], str]  # ids of a response to its text, without stop tokens
Advance = Callable[[int], None]


class Validator:
    """Greedy answers to fixed held-out prompts. `answers` keeps those of the last measurement, scored by
    `reward`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward,
        proxy_reward: Reward | None,  # what training maximises, where that is not the truth
        prompts: Sequence[Prompt],
        *,
        decode: Decode,
        max_new_tokens: int,
    ) -> None:
        self.engine, self.prompts = engine, prompts
        self.reward, self.proxy_reward = reward, proxy_reward
        self.decode, self.max_new_tokens = decode, max_new_tokens
        self.answers: list[Trajectory] = []
        self.clock = Clock()

    def measure(self, advance: Advance | None = None) -> Metrics:
        """val/score, val/proxy_score, val/response_length, val/repetition, val/truncated, val/unscored.

        Rows without a score (no ground truth) are counted and left out of the mean; where no row has one
        there is no val/score. No prompts, no metrics.
        """
        if not self.prompts:
            return {}
        with self.clock("testing"):
            answers = answer(
                self.engine,
                self.prompts,
                n=1,
                temperature=0.0,
                max_new_tokens=self.max_new_tokens,
                seed=0,
                decode=self.decode,
                advance=advance,
            )
        with self.clock("reward"):
            return self._judged([row for (row,) in answers])

    def _judged(self, rows: list[Trajectory]) -> Metrics:
        self.answers = scored(rows, self.reward)
        scores = known_scores(self.answers)
        metrics = {f"val/{name}": value for name, value in shape(rows).items()}
        metrics["val/unscored"] = float(len(rows) - len(scores))
        if scores:
            metrics["val/score"] = sum(scores) / len(scores)
        if self.proxy_reward is not None:
            proxy = [score for score in self.proxy_reward(rows) if score is not None]
            if proxy:
                metrics["val/proxy_score"] = sum(proxy) / len(proxy)
        return metrics


def answer(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    decode: Decode,
    advance: Advance | None = None,
) -> list[list[Trajectory]]:
    """n answers to each prompt as rows that a reward can score; temperature 0 is greedy."""
    completions = engine.generate(
        prompts,
        n=n,
        temperature=temperature,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        seed=seed,
        advance=advance,
    )
    return [
        [_row(prompt, completion, decode, temperature) for completion in found]
        for prompt, found in zip(prompts, completions, strict=True)
    ]


def _row(prompt: Prompt, completion: Completion, decode: Decode, temperature: float) -> Trajectory:
    return Trajectory(
        where=prompt.where,
        messages=prompt.messages,
        prompt_ids=prompt.prompt_ids,
        response_ids=completion.response_ids,
        response_mask=np.ones(len(completion.response_ids), dtype=np.bool_),
        response=decode(completion.response_ids),
        finish_reason=completion.finish_reason,
        temperature=temperature or 1.0,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )


def scored(rows: Sequence[Trajectory], reward: Reward) -> list[Trajectory]:
    """The same rows with the reward's scores."""
    return [row.with_score(score) for row, score in zip(rows, reward(rows), strict=True)]


def known_scores(rows: Sequence[Trajectory]) -> list[float]:
    return [row.score for row in rows if row.score is not None]


def shape(rows: Sequence[Trajectory]) -> Metrics:
    """Means over the answers: tokens, share of repeated 4-grams, share cut off by the length limit."""
    count = max(len(rows), 1)
    return {
        "response_length": sum(len(row.response_ids) for row in rows) / count,
        "repetition": sum(repetition(torch.tensor(row.response_ids)) for row in rows) / count,
        "truncated": sum(row.finish_reason == "length" for row in rows) / count,
    }
