"""Walks on random graphs (after trlX's randomwalks): graphs, stored walks, exact scores of a policy.

A walk is a prompt, its start node, and a response, the nodes it moves to: one token each, no end token. All
is in token ids; GOAL is the goal's. Short task: the first visit to the goal ends the walk, which scores
(moves allowed - moves made) / (moves allowed - fewest moves); one that gets there too late or leaves the
graph scores 0. Long task: LONG_MOVES moves, through the goal and on; the score is visits to the goal / most
possible visits, and a move that leaves the graph ends the walk. What is trained on them, and how, is in
walks_run.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rein.models.tiny import SPECIALS
from rein.types import Metrics, Trajectory

NODES, EDGE = 21, 0.1
MOVES, LONG_MOVES = 9, 100
LETTERS = "abcdefghijklmnopqrstu"
GOAL, VOCABULARY = len(SPECIALS), len(SPECIALS) + NODES
STARTS = torch.arange(GOAL + 1, VOCABULARY)
PRUNED = 1e-6  # prefixes less likely than this are not followed: their walks count as failed


@dataclass(frozen=True)
class Graph:
    """A task: which moves there are, and what a perfect walk from each node gets."""

    seed: int
    long: bool
    moves: int  # allowed
    edges: Tensor  # [VOCABULARY, VOCABULARY] bool, from row to column
    best: Tensor  # [VOCABULARY] fewest moves to the goal; long: most visits to it

    def score(self, start: Tensor, made: int) -> Tensor:
        """Of walks that reach the goal with move `made`."""
        return (self.moves - made) / (self.moves - self.best[start])


def make_graph(seed: int, *, long: bool = False) -> Graph:
    """Each edge with probability EDGE, until every node has one and a way to the goal within MOVES - 1."""
    rng = np.random.default_rng(seed)
    while True:
        edges = rng.random((NODES, NODES)) < EDGE
        np.fill_diagonal(edges, False)
        best = np.full(NODES, float(NODES))
        best[0] = 0
        for step in range(1, MOVES):
            best[(best == NODES) & edges[:, best == step - 1].any(1)] = step
        if edges.any(1).all() and best.max() < MOVES:
            break
    if long:
        best = np.zeros(NODES)
        for _ in range(LONG_MOVES):
            reward = best + (np.arange(NODES) == 0)
            best = np.array([reward[edges[node]].max() for node in range(NODES)])
    wide = np.pad(edges, (GOAL, 0))
    return Graph(
        seed, long, LONG_MOVES if long else MOVES, torch.tensor(wide), torch.tensor(np.pad(best, (GOAL, 0)))
    )


class Mover:
    """A policy one move at a time: the cache of the walks under way, and the next token's probabilities."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.made = model, DynamicCache(config=model.config), 0

    @torch.no_grad()
    def move(self, at: Tensor) -> Tensor:
        """[P] tokens -> [P, VOCABULARY], float64."""
        positions = torch.full((len(at), 1), self.made)
        self.made += 1
        out = self.model(input_ids=at[:, None], position_ids=positions, cache=self.cache, use_cache=True)
        chances: Tensor = out.logits[:, -1].double().softmax(-1)
        return chances

    def keep(self, walks: Tensor) -> None:
        self.cache.batch_select_indices(walks)


class AtRandom:
    """Who logged the walks: every edge of a node is as likely."""

    def __init__(self, graph: Graph) -> None:
        self.chances = graph.edges.double() / graph.edges.double().sum(1, keepdim=True)

    def move(self, at: Tensor) -> Tensor:
        return self.chances[at]

    def keep(self, walks: Tensor) -> None:
        pass


def measure(model: Any, graph: Graph, walks: int = 128) -> Metrics:
    """val/score: mean over starts and sampled moves; val/invalid: the chance that a walk leaves the graph.

    Exact on the short task; on the long one from `walks` walks, always with the same random numbers.
    """
    if graph.long:
        rows, invalid = sample(Mover(model), graph, walks, seed=0)
        return {"val/score": float(np.mean([row.score for row in rows])), "val/invalid": invalid}
    return exact(Mover(model), graph)


def exact(mover: Mover | AtRandom, graph: Graph) -> Metrics:
    """Every prefix of a walk is followed, with its probability."""
    start = at = STARTS
    reach = torch.full((len(STARTS),), 1 / len(STARTS), dtype=torch.float64)
    score = invalid = pruned = 0.0
    for made in range(1, graph.moves + 1):
        chances = reach[:, None] * mover.move(at)
        on = chances.where(graph.edges[at], 0)
        invalid += (chances.sum() - on.sum()).item()
        score += (on[:, GOAL] * graph.score(start, made)).sum().item()
        on[:, GOAL] = 0
        walk, following = (on > PRUNED).nonzero(as_tuple=True)
        if made == graph.moves or not len(walk):
            break
        pruned += (on.sum() - on[walk, following].sum()).item()
        start, at, reach = start[walk], following, on[walk, following]
        mover.keep(walk)
    return {"val/score": score, "val/invalid": invalid, "val/pruned": pruned}


def sample(
    mover: Mover | AtRandom, graph: Graph, walks: int, seed: int, version: int = 0
) -> tuple[list[Trajectory], float]:
    """Scored walks as stored rows, and the chance that one leaves the graph, over the states they visit."""
    generator = torch.Generator().manual_seed(seed)
    first = STARTS[torch.randint(len(STARTS), (walks,), generator=generator)]
    start, at, walk = first, first, torch.arange(walks)
    ids = torch.zeros(walks, graph.moves, dtype=torch.long)
    log_probs, score = torch.zeros(walks, graph.moves, dtype=torch.float64), torch.zeros(walks).double()
    length, invalid = torch.zeros(walks, dtype=torch.long), 0.0
    for made in range(1, graph.moves + 1):
        chances, edges = mover.move(at), graph.edges[at]
        invalid += (1 - chances.where(edges, 0).sum(1)).sum().item() / walks
        following = torch.multinomial(chances, 1, generator=generator)
        on = edges.gather(1, following)[:, 0]
        ids[walk, made - 1], log_probs[walk, made - 1] = (
            following[:, 0],
            chances.gather(1, following)[:, 0].log(),
        )
        length[walk] = made
        following = following[:, 0]
        arrived = on & (following == GOAL)
        if graph.long:
            score[walk[arrived]] += 1 / graph.best[start[arrived]]
        else:
            score[walk[arrived]] = graph.score(start[arrived], made)
            on = on & ~arrived
        left = on.nonzero()[:, 0]
        if not len(left):
            break
        start, at, walk = start[left], following[left], walk[left]
        mover.keep(left)
    rows = zip(first.tolist(), length.tolist(), ids, log_probs, score.tolist(), strict=True)
    return [
        Trajectory(
            where=f"walk {i}",
            messages=_text([begin]),
            prompt_ids=np.array([begin]),
            response_ids=tokens[:size].numpy(),
            response_mask=np.ones(size, dtype=np.bool_),
            response=_text(tokens[:size].tolist()),
            behavior_log_probs=logs[:size].float().numpy(),
            score=scored,
            finish_reason="stop",
            group=_text([begin]),
            policy_version=version,
        )
        for i, (begin, size, tokens, logs, scored) in enumerate(rows)
    ], invalid


def _text(ids: list[int]) -> str:
    return "".join(LETTERS[token - GOAL] for token in ids if token >= GOAL)
