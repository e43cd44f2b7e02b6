"""Rows whose sampler is known: what the model says of them tells who wrote them, and the verdict follows."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import VOCABULARY
from training_made import moved

from rein.audit.model import facts, sample_of
from rein.data.audit.verdict import Evidence, Verdict, judge
from rein.engines.hf import HfEngine
from rein.experience import in_micro_batches
from rein.models.actor import Actor, load_actor
from rein.types import Prompt, Trajectory

EVIDENCE = Evidence("trajectories", rows=512, prompts=64, scored=512, scores=2)
SIZE = 4096
Make = Callable[[Actor, Actor], list[Trajectory]]


@pytest.fixture(scope="module")
def actors(tiny_lm: str) -> tuple[Actor, Actor]:
    """A policy that is sure of some tokens, and a somewhat different one."""
    actor = load_actor(tiny_lm)
    moved(actor.model, 1, 0.3)
    other = copy.deepcopy(actor)
    moved(other.model, 2, 0.05)
    return actor, other


def written(actor: Actor, temperature: float = 1.0, top_p: float = 1.0) -> list[Trajectory]:
    draw = np.random.default_rng(0)
    prompts = [Prompt(f"row {i}", "", draw.integers(4, VOCABULARY, 3), None, "", {}) for i in range(64)]
    engine = HfEngine(actor.model, actor.tokenizer, [])
    answers = engine.generate(prompts, n=8, temperature=temperature, top_p=top_p, max_new_tokens=12, seed=0)
    return [
        Trajectory(
            where=prompt.where,
            messages="",
            prompt_ids=prompt.prompt_ids,
            response_ids=own.response_ids,
            response_mask=np.ones(len(own.response_ids), dtype=np.bool_),
            behavior_log_probs=own.log_probs,
            temperature=temperature,
        )
        for prompt, completions in zip(prompts, answers, strict=True)
        for own in completions
    ]


def scored_by(actor: Actor, rows: list[Trajectory], temperature: float = 1.0) -> list[Trajectory]:
    """The rows with this model's log-probs at this temperature, and said to be sampled at it."""
    stated = [dataclasses.replace(row, temperature=temperature) for row in rows]
    found = in_micro_batches(stated, SIZE, lambda part, temp: actor.log_probs(part, temp)[0]).numpy()
    return [dataclasses.replace(row, behavior_log_probs=log) for row, log in zip(stated, found, strict=True)]


def less_the_tail(actor: Actor, rows: list[Trajectory], top_p: float) -> list[Trajectory]:
    def mass(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(logits, -1).sort(-1, descending=True).values
        return p.where(p.cumsum(-1) - p < top_p, 0).sum(-1).log()[None]

    kept = actor.over_logits(rows, torch.ones(len(rows)), mass)[0].numpy()
    return [
        dataclasses.replace(row, behavior_log_probs=row.behavior_log_probs - log)
        for row, log in zip(rows, kept, strict=True)
    ]


OWN = {"data.behavior": "recomputed"}
KINDS: dict[str, tuple[Make, str, dict[str, Any]]] = {
    "own": (lambda a, b: written(a), "reproduced", {}),
    "own, hot": (lambda a, b: written(a, 1.5), "reproduced", {}),
    "another's, with its log-probs": (lambda a, b: written(b), "stale", {}),
    "another's log-probs": (lambda a, b: scored_by(b, written(a)), "wrong model", OWN),
    "colder than stated": (lambda a, b: scored_by(a, written(a, 0.6)), "wrong temperature", {}),
    "hotter than stated": (lambda a, b: scored_by(a, written(a, 1.5)), "wrong temperature", {}),
    "a nucleus": (lambda a, b: written(a, top_p=0.8), "top-p cut", {}),
    "a nucleus, renormalised": (
        lambda a, b: less_the_tail(a, written(a, top_p=0.8), 0.8),
        "top-p cut",
        {},
    ),
}


def verdict_of(actors: tuple[Actor, Actor], make: Make) -> Verdict:
    return judge(EVIDENCE, facts(actors[0], make(*actors), SIZE))


@pytest.mark.parametrize("kind", KINDS)
def test_the_verdict_knows_who_wrote_the_rows(kind: str, actors: tuple[Actor, Actor]) -> None:
    make, finding, settings = KINDS[kind]
    found = verdict_of(actors, make)
    assert [reason.finding for reason in found.reasons] == [finding], found.reasons
    assert found.settings.items() >= settings.items()
    assert bool(found.settings) == bool(settings)
    limits = finding in ("wrong model", "wrong temperature", "top-p cut")
    assert found.decision == ("limits" if limits else "train")


def test_rows_without_log_probs_far_from_the_model_are_for_awr(actors: tuple[Actor, Actor]) -> None:
    draw = np.random.default_rng(0)
    rows = [
        dataclasses.replace(
            row, behavior_log_probs=None, response_ids=draw.integers(0, VOCABULARY, len(row.response_ids))
        )
        for row in written(actors[0])
    ]
    found = judge(EVIDENCE, facts(actors[0], rows, SIZE))
    assert found.method == "awr"
    assert [reason.finding for reason in found.reasons] == ["behavior unknown", "far"]


def test_numbers_do_not_follow_from_order_or_micro_batches(actors: tuple[Actor, Actor]) -> None:
    rows = written(actors[1])[:100]
    one, other = facts(actors[0], rows, SIZE), facts(actors[0], rows[::-1], 64)
    assert sample_of(rows) == sample_of(rows[::-1])
    for name in ("nll", "perplexity"):
        assert one[name] == pytest.approx(other[name], rel=1e-5)
    for name in ("k3_kl", "kl"):
        assert one["distance"][name] == pytest.approx(other["distance"][name], rel=1e-3)
    assert sum(part["rows"] for part in one["by_length"].values()) == 100
    assert sum(part["rows"] for part in one["by_policy"].values()) == 100
