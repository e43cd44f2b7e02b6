"""Rows made on the spot, as models and losses read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rein.types import Ids, Prompt, Trajectory

VOCABULARY = 18


@dataclass(frozen=True)
class Row:
    """Implements types.TokenRow."""

    prompt_ids: Ids
    response_ids: Ids


def row(prompt: Sequence[int], response: Sequence[int]) -> Row:
    return Row(np.array(prompt, dtype=np.int64), np.array(response, dtype=np.int64))


def random_rows(count: int, seed: int = 0, longest: int = 9) -> list[Row]:
    """Prompts and responses of 1 to `longest` tokens."""
    draw = np.random.default_rng(seed)
    return [
        row(
            draw.integers(0, VOCABULARY, draw.integers(1, longest + 1)).tolist(),
            draw.integers(0, VOCABULARY, draw.integers(1, longest + 1)).tolist(),
        )
        for _ in range(count)
    ]


def random_trajectories(
    count: int,
    seed: int = 0,
    *,
    longest: int = 9,
    temperatures: Sequence[float] = (1.0,),
    holes: bool = False,  # some tokens inside do not count
    behavior: bool = True,
) -> list[Trajectory]:
    """Scored rows, each a prompt of its own; the last token always counts."""
    draw = np.random.default_rng(seed + 1000)
    made = []
    for i, some in enumerate(random_rows(count, seed, longest)):
        length = len(some.response_ids)
        mask = np.ones(length, dtype=np.bool_)
        if holes:
            mask = draw.random(length) < 0.7
            mask[-1] = True
        log_probs = -3 * draw.random(length).astype(np.float32)
        made.append(
            Trajectory(
                where=f"made row {i}",
                messages=f"prompt {i}",
                prompt_ids=some.prompt_ids,
                response_ids=some.response_ids,
                response_mask=mask,
                behavior_log_probs=log_probs if behavior else None,
                score=float(draw.integers(0, 2)),
                temperature=temperatures[i % len(temperatures)],
                group=f"prompt {i}",
            )
        )
    return made


def prompts(texts: Sequence[Sequence[int]]) -> list[Prompt]:
    return [
        Prompt(where=f"made prompt {i}", messages="", prompt_ids=np.array(ids, dtype=np.int64))
        for i, ids in enumerate(texts)
    ]


def own_log_probs(model: torch.nn.Module, some: Row, temperature: float = 1.0) -> torch.Tensor:
    """What the model's own forward, without packing, says of the row's response tokens."""
    ids = torch.from_numpy(np.concatenate([some.prompt_ids, some.response_ids]))
    logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
    begin = len(some.prompt_ids)
    log_p = (logits[begin - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[begin:, None]).squeeze(-1)
