"""The watched KL is exact, 0 at the start, and measured against a reference that stays where it was."""

import dataclasses

import numpy as np
import pytest
import torch
from rows_made import random_trajectories
from training_made import moved

from rein.models.actor import Actor, load_actor
from rein.models.lora import adapters_off
from rein.probe import Probe
from rein.types import Metrics, Trajectory

ROWS = random_trajectories(9, seed=2, holes=True, temperatures=(1.0, 0.5))


def brute_force(actor: Actor, start: Actor, rows: list[Trajectory]) -> Metrics:
    """Sums over the whole vocabulary at each counted token, by two plain forward passes."""
    kls, entropies = [], []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))[None]
        cut, counted = slice(len(row.prompt_ids) - 1, -1), torch.from_numpy(row.response_mask)
        with torch.no_grad():
            log_p, log_q = (
                (
                    some.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, cut]
                    / row.temperature
                )
                .double()
                .log_softmax(-1)
                for some in (actor, start)
            )
        kls.append((log_p.exp() * (log_p - log_q)).sum(-1)[counted])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[counted])
    return {
        "probe/kl_reference": torch.cat(kls).mean().item(),
        "probe/entropy": torch.cat(entropies).mean().item(),
    }


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}], ids=["whole model", "adapters"])
def test_the_kl_is_exactly_0_before_the_first_update(options: dict[str, int], tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, **options)  # type: ignore[arg-type]
    assert Probe(actor, ROWS, 40).measure()["probe/kl_reference"] == 0


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}], ids=["whole model", "adapters"])
def test_after_a_change_of_weights_the_kl_is_that_of_brute_force(
    options: dict[str, int], tiny_lm: str
) -> None:
    actor, start = load_actor(tiny_lm, **options), load_actor(tiny_lm)  # type: ignore[arg-type]
    probe = Probe(actor, ROWS, 40)
    moved(actor.model, 3, size=0.3 if options else 0.1)
    found, expected = probe.measure(), brute_force(actor, start, ROWS)
    assert expected["probe/kl_reference"] > 0.01
    assert found == pytest.approx(expected, rel=1e-4)
    with adapters_off(actor.model):
        assert (probe.measure()["probe/kl_reference"] == 0) == bool(options)


def test_the_reference_s_head_stays_when_the_shared_matrix_trains(tiny_lm: str) -> None:
    actor, start = load_actor(tiny_lm), load_actor(tiny_lm)
    probe = Probe(actor, ROWS, 1000)
    with torch.no_grad():
        actor.model.lm_head.weight[5] += 1.0
    assert probe.measure() == pytest.approx(brute_force(actor, start, ROWS), rel=1e-4)


def test_a_frozen_head_is_kept_without_a_copy(tiny_lm: str) -> None:
    whole, adapted = load_actor(tiny_lm), load_actor(tiny_lm, lora_rank=4)
    for actor, own in ((whole, True), (adapted, False)):
        probe = Probe(actor, ROWS, 40)
        with torch.no_grad():
            before = probe.head(probe.hidden[0])
            actor.model.lm_head.weight.add_(1.0)
            assert torch.equal(probe.head(probe.hidden[0]), before) == own


@pytest.mark.parametrize("budget", [1, 25, 100_000])
def test_the_token_budget_changes_nothing(budget: int, tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, dtype="float64")
    probes = [Probe(actor, ROWS, some) for some in (budget, 60)]
    moved(actor.model, 4)
    one, other = (probe.measure() for probe in probes)
    assert one == pytest.approx(other, rel=1e-9)


def test_tokens_that_do_not_count_are_left_out(tiny_lm: str) -> None:
    actor, start = load_actor(tiny_lm), load_actor(tiny_lm)
    whole = [dataclasses.replace(row, response_mask=np.ones_like(row.response_mask)) for row in ROWS]
    probes = [Probe(actor, rows, 50) for rows in (ROWS, whole)]
    moved(actor.model, 5, size=0.1)
    counted, everything = (probe.measure() for probe in probes)
    assert counted["probe/kl_reference"] != pytest.approx(everything["probe/kl_reference"], rel=1e-3)
    assert everything == pytest.approx(brute_force(actor, start, whole), rel=1e-4)


def test_the_probe_needs_no_behavior_log_probs_and_leaves_no_gradient(tiny_lm: str) -> None:
    actor = load_actor(tiny_lm)
    probe = Probe(actor, random_trajectories(3, behavior=False), 50)
    assert probe.measure()["probe/entropy"] > 0
    assert all(parameter.grad is None for parameter in actor.model.parameters())
    assert not any(hidden.requires_grad for hidden in probe.hidden)


def test_without_rows_nothing_is_claimed(tiny_lm: str) -> None:
    assert Probe(load_actor(tiny_lm), [], 50).measure() == {}
