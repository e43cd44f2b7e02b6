"""What `rein check` reckons with is what passes do: numbers kept, positions of packs, a rank's parts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rows_made import random_rows, random_trajectories
from training_made import recipe

from rein.commands import check_memory, check_parts
from rein.commands.check_fit import fit_lines, refuse_undividable
from rein.commands.check_memory import PROCESS, Parts, estimate
from rein.commands.check_packs import Pack, largest_pack, positions, reckoned_pack
from rein.commands.check_plan import Plan
from rein.commands.check_shapes import Shape, read_shape
from rein.config.recipe import Recipe
from rein.engines import slots
from rein.errors import ConfigError
from rein.learner import Learner
from rein.models import head
from rein.models.actor import load_actor
from rein.models.packing import pack
from rein.models.tiny import make_tiny
from rein.probe import PROBE_ROWS
from rein.runtime.single import SingleMesh

PLAN = Plan("train", used=64, mean_tokens=100, mean_prompt=40, longest=160, pack=Pack(1000, 600, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0, hidden=64, layers=3)


@pytest.fixture(scope="module")
def shape(folder: Path) -> Shape:
    found = read_shape(folder)
    assert found is not None
    return found


def nodes(last: Any) -> Iterator[Any]:
    """Every step of a graph."""
    open_ones, seen = [last], set()
    while open_ones:
        node = open_ones.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_ones += [before for before, _ in node.next_functions]
            yield node


def kept_bytes(values: torch.Tensor, weights: set[int]) -> int:
    """Of what the steps of its graph keep, but weights."""
    storages: dict[int, int] = {}
    for node in nodes(values.grad_fn):
        named = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        for tensor in (*getattr(node, "saved_tensors", ()), *named):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in weights:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_pass_keeps_as_many_numbers_as_are_reckoned(folder: Path, shape: Shape) -> None:
    actor, rows = load_actor(str(folder)), random_rows(12, longest=30)
    values, _ = actor.log_probs(rows, torch.ones(12))
    weights = {parameter.data_ptr() for parameter in actor.model.parameters()}
    tokens, answered = int(pack(rows).input_ids.numel()), sum(len(row.response_ids) for row in rows)
    some = recipe()
    back = tokens * (5 * shape.intermediate + 2 * shape.hidden) * 4
    reckoned = check_parts.activations(some, shape, Pack(tokens, answered, 1), 4, head=True) - back
    reckoned += answered * shape.vocabulary * 4  # of the head; here less than the gated layer's steps take
    assert kept_bytes(values, weights) == pytest.approx(reckoned, rel=0.05)


def test_constants_are_those_of_what_they_speak_of() -> None:
    assert (check_parts.TILE, check_parts.KEPT) == (head.TILE, head._KEPT)
    assert (check_memory.PROBE_ROWS, check_parts.READ_TOKENS) == (PROBE_ROWS, slots.READ_TOKENS)


def test_the_largest_micro_batch_is_what_training_cuts(folder: Path) -> None:
    rows = random_trajectories(24, longest=40)
    some = recipe(24, actor={"ppo_max_token_len_per_gpu": 200})
    learner = Learner(
        some, load_actor(str(folder)), None, SingleMesh(),
        kl_coef_in_loss=0.0, kl_coef_in_reward=0.0, actor_steps=1, critic_steps=1,
    )  # fmt: skip
    (update,) = learner.updates(24, 0)
    ordered = [rows[i] for i in update.rows]
    parts = learner._micro_batches(update, type("E", (), {"rows": rows})())
    found = largest_pack(some, rows)
    assert found is not None
    assert found.turns == len(parts)
    largest = max(int(pack([ordered[i] for i in part], share=True).input_ids.numel()) for part in parts)
    assert found.tokens == pytest.approx(largest, rel=0.05)
    assert positions(rows) == int(pack(rows, share=True).input_ids.numel())


def test_a_budget_is_shared_evenly() -> None:
    assert reckoned_pack(12, 110, 160, 1024, prompt=33) == Pack(660, pytest.approx(462), 2)
    assert reckoned_pack(12, 110, 160, 1024, ranks=2) == Pack(660, 660, 1)
    assert reckoned_pack(12, 110, 2000, 1024).tokens == 2000


def of_train(shape: Shape, **sections: Any) -> Parts:
    some = recipe(**sections)
    shapes: dict[str, Shape | None] = {"actor": shape, "critic": shape}
    return estimate(some, {"train": PLAN}, shapes)["train"]


def ranked(count: int, **more: Any) -> Recipe:
    words = {"runtime": "fsdp", "nproc": count, "guards": {"preset": "off"}, **more}
    return Recipe.model_validate(words)


def test_a_rank_holds_its_part_and_what_is_gathered(shape: Shape) -> None:
    one = of_train(shape)
    shapes: dict[str, Shape | None] = {"actor": shape, "critic": shape}
    two, four = (estimate(ranked(n), {"train": PLAN}, shapes)["train"] for n in (2, 4))
    assert (two.adam, four.adam) == (one.adam / 2, one.adam / 4)
    assert (two.gradients, four.gradients) == (one.gradients / 2, one.gradients / 4)
    assert one.gathered == one.opening == 0 < two.gathered == four.gathered
    assert two.activations == one.activations
    assert two.holes == 0 < one.holes
    assert four.opening >= 2 * 4 * shape.parameters


def test_a_large_vocabulary_costs_its_logits(shape: Shape) -> None:
    large = replace(shape, vocabulary=100_000)
    plain = of_train(large)
    assert of_train(large, model={"logits_chunk": 2**16}).activations < plain.activations
    assert of_train(large, model={"logits_chunk": 2**16}).probe < plain.probe
    assert of_train(large, actor={"kl_loss_type": "full"}).activations > plain.activations


def test_a_sum_is_that_of_its_parts() -> None:
    parts = Parts(
        weights=1.0, gradients=2.0, adam=4.0, activations=8.0, gathered=16.0, probe=32.0, kept=False
    )
    assert parts.total == PROCESS + check_memory.WORKING + 1 + 4 + 32
    assert Parts(opening=2.0**40).total == PROCESS + 2.0**40


def test_processes_of_a_machine_are_counted_together() -> None:
    said, warned = fit_lines(ranked(3), {"train": Parts(), "evaluate": Parts(weights=1.0)})
    assert "in 3 processes of a machine" in said[0]
    assert not warned
    said, warned = fit_lines(ranked(2, nnodes=2), {"train": Parts(weights=2.0**60)})
    assert "needs torchrun on each machine" in said[1]
    assert len(warned) == 1
    assert warned[0].startswith("train needs ")


def on_ray(count: int, placement: str, **more: Any) -> Recipe:
    return ranked(count, **{"runtime": "ray", "critic": {"placement": placement}, **more})


def test_workers_of_one_role_hold_that_role_alone(shape: Shape) -> None:
    shapes: dict[str, Shape | None] = {"actor": shape, "critic": replace(shape, layers=6)}
    exact = {"actor": {"kl_loss_type": "full"}}
    for more in ({}, exact):
        both, apart = (
            estimate(on_ray(2, placement, **more), {"train": PLAN}, shapes)
            for placement in ("colocated", "separate")
        )
        assert list(both) == ["train", "train: driver"]
        assert list(apart) == ["train: actor", "train: critic", "train: driver"]
        one, actor, critic = both["train"], apart["train: actor"], apart["train: critic"]
        assert actor.weights + critic.weights == one.weights
        assert actor.adam + critic.adam == one.adam
        assert max(actor.activations, critic.activations) == one.activations
        assert (actor.probe, critic.probe) == (one.probe, 0)
        assert critic.weights == critic.gradients == critic.adam / 2 == 4 * shape.parameters / 2
        assert critic.opening == 4 * shape.parameters * 1.5  # whole, beside the half that is cut of it
        assert critic.decoding == 4 * shape.parameters  # whole, when its folder is written
        models = 3 if more else 2  # the frozen start policy, which is the actor's, not the critic's
        assert actor.opening == 4 * shape.parameters * (models - 1 + 0.5)
        assert both["train: driver"] == apart["train: driver"]
        assert both["train: driver"].opening == 4 * shape.parameters * models


def test_a_lone_worker_s_models_are_cut_too(shape: Shape) -> None:
    found = estimate(on_ray(1, "separate"), {"train": PLAN}, {"actor": shape, "critic": shape})
    assert all(found[f"train: {role}"].gathered > 0 for role in ("actor", "critic"))
    assert not any(parts.kept for parts in found.values())
    one = estimate(ranked(1), {"train": PLAN}, {"actor": shape, "critic": shape})
    assert (list(one), one["train"].gathered) == (["train"], 0)


def test_the_reward_model_of_a_ray_run_is_the_driver_s(shape: Shape) -> None:
    shapes: dict[str, Shape | None] = {"actor": shape, "critic": shape}
    judged = shapes | {"reward model": shape}
    for some, at in ((on_ray(2, "separate"), "train: driver"), (ranked(2), "train")):
        plain, found = (estimate(some, {"train": PLAN}, each) for each in (shapes, judged))
        for row in found:
            more = 4 * shape.parameters if row == at else 0
            assert found[row].weights - plain[row].weights == more


def test_a_machine_has_room_for_workers_of_both_roles_and_the_driver() -> None:
    memory = {f"train: {kind}": Parts(kept=False) for kind in ("actor", "critic", "driver")}
    memory |= {"evaluate": Parts(weights=2.0**30)}
    each = Parts().total
    for some, count in ((on_ray(3, "separate"), 7), (on_ray(3, "separate", nnodes=2), 13)):
        said, _ = fit_lines(some, memory)
        n = count // 2
        assert f"{n} x 570 MiB (actor) + {n} x 570 MiB (critic) + 1 x 570 MiB (driver)" in said[0]
        assert f"{count * each / 2**30:.2f} GiB together" in said[0]
        assert len(said) == 1
    said, _ = fit_lines(on_ray(3, "separate", nnodes=2, ray={"address": "auto"}), memory)
    assert "3 x 570 MiB (actor)" in said[0]
    assert said[1] == "nnodes 2: each machine of the cluster needs that much memory"
    said, warned = fit_lines(on_ray(1, "separate"), memory | {"train: critic": Parts(weights=2.0**60)})
    assert len(warned) == 1
    assert warned[0].startswith("train needs ")


def test_ranks_that_cannot_share_the_heads_are_refused(shape: Shape) -> None:
    some = ranked(3, fsdp={"ulysses_sequence_parallel_size": 3})
    with pytest.raises(ConfigError, match="3 does not divide the 4 heads of the actor; write a divisor"):
        refuse_undividable(some, {"actor": shape, "critic": None})
    refuse_undividable(ranked(2, fsdp={"ulysses_sequence_parallel_size": 2}), {"actor": shape})
