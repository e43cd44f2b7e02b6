"""On a GPU everything is as on the CPU: `pytest -m gpu`. Each claim is held against the CPU's own numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from naive_attention import drawn_pack, naive
from rows_made import prompts, random_rows, random_trajectories
from training_made import experience_of, learner_of, models, recipe

from rein.config.recipe import Model
from rein.engines.hf import HfEngine
from rein.errors import ConfigError
from rein.learner import Learner
from rein.models import attention, varlen
from rein.models.actor import load_actor
from rein.models.place import CPU, Place, place_of
from rein.models.tiny import make_tiny
from rein.runtime import fsdp
from rein.runtime.gpu import take_own_gpu
from rein.runtime.ranks import Group
from rein.snapshots import write_alone
from rein.types import Experience, Metrics, Trajectory, Update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),  # compilers and NCCL have hints of their own
]
GPU = Place("cuda")
ROWS = 12
KERNELS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not varlen.installed(name), reason=f"{name} is not installed")
    )
    for name in varlen.KERNELS
]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Heads of 16 numbers, which every kernel reads."""
    return str(make_tiny(tmp_path_factory.mktemp("models") / "lm", seed=0, hidden=64, layers=2))


def updated(lm: str, place: Place, **options: Any) -> tuple[Learner, Experience, dict[str, Metrics]]:
    """A learner that has made one update of each role, without the optimizer's step."""
    actor, critic = models(lm, place=place, **options)
    some = recipe(ROWS, actor={"ppo_mini_batch_size": ROWS, "ppo_epochs": 1, "entropy_coeff": 0.01})
    experience = experience_of(some, actor, critic, trajectories())
    learner = learner_of(some, actor, critic)
    said = {
        role: learner.backward(Update(role, tuple(range(ROWS)), 0), experience)
        for role in ("critic", "actor")
    }
    return learner, experience, said


def trajectories() -> list[Trajectory]:
    return random_trajectories(ROWS, longest=40, holes=True, temperatures=(1.0, 0.7))


def gradients(learner: Learner) -> torch.Tensor:
    named = [pair for role in learner.optimizers.values() for pair in role.named]
    return torch.cat(
        [parameter.grad.detach().cpu().flatten() for _, parameter in named if parameter.grad is not None]
    )


def weights(learner: Learner) -> torch.Tensor:
    named = learner.state()[0]
    return torch.cat(
        [tensor.detach().cpu().flatten() for name, tensor in named.items() if "/weight/" in name]
    )


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, over the norm."""
    return float((one - other).norm() / other.norm())


def test_auto_is_the_gpu_and_cpu_is_the_cpu() -> None:
    assert place_of(Model()) == GPU
    assert place_of(Model(device="cpu")) == CPU
    take_own_gpu(1)
    with pytest.raises(ConfigError, match="ranks need a GPU each"):
        take_own_gpu(torch.cuda.device_count() + 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"lora_rank": 4}, {"enable_gradient_checkpointing": True}],
    ids=["plain", "lora", "checkpointing"],
)
def test_one_update_in_float32_is_the_cpus(lm: str, options: dict[str, Any]) -> None:
    here, mine, said_here = updated(lm, CPU, **options)
    there, theirs, said_there = updated(lm, GPU, **options)
    assert not torch.backends.cuda.matmul.allow_tf32  # "exact" is float32's
    assert {parameter.device.type for parameter in there.actor.model.parameters()} == {"cuda"}
    assert theirs.old_log_probs.device.type == "cpu"
    assert (mine.old_log_probs - theirs.old_log_probs).abs().max() < 1e-3
    for role, metrics in said_here.items():
        for name, value in metrics.items():
            assert said_there[role][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert near(gradients(there), gradients(here)) < 1e-3
    for role in ("critic", "actor"):
        here.apply(role)
        there.apply(role)
    assert near(weights(there), weights(here)) < 1e-3


@pytest.mark.parametrize("kernel", ["auto", "sdpa", *KERNELS])
def test_bfloat16_is_near_float32_whatever_attends(lm: str, kernel: str) -> None:
    exact, mine, _ = updated(lm, GPU)
    fast, theirs, _ = updated(lm, Place("cuda", kernel), precision="fast")
    mask = mine.response_mask
    assert (mine.old_log_probs - theirs.old_log_probs).abs()[mask].mean() < 2e-2
    assert near(gradients(fast), gradients(exact)) < 5e-2
    kinds = {parameter.dtype for parameter in fast.actor.model.parameters()}
    assert kinds == {torch.float32}  # the masters


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_attends_within_rows_as_it_is_defined(kernel: str, window: int | None) -> None:
    given, grad, layout = drawn_pack(random_rows(9, longest=60), torch.bfloat16, "cuda")
    wide = [tensor.detach().float().requires_grad_() for tensor in given]
    found = varlen.KERNELS[kernel](*given, layout, None, window)
    true = naive(*wide, layout.lengths, window)
    assert near(found.detach().float(), true.detach()) < 1e-2
    found.backward(grad)
    true.backward(grad.float())
    for mine, own in zip(given, wide, strict=True):
        assert mine.grad is not None
        assert own.grad is not None
        assert near(mine.grad.float(), own.grad) < 2e-2


@pytest.mark.parametrize("window", [None, 7])
def test_blocks_attend_within_rows_in_float32(window: int | None) -> None:
    given, grad, layout = drawn_pack(random_rows(9, longest=60), torch.float32, "cuda")
    own = [tensor.detach().clone().requires_grad_() for tensor in given]
    found = attention._of_pack(*given, layout, None, window, "auto")
    true = naive(*own, layout.lengths, window)
    assert near(found.detach(), true.detach()) < 1e-5
    found.backward(grad)
    true.backward(grad)
    for mine, other in zip(given, own, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert near(mine.grad, other.grad) < 1e-5


@pytest.mark.parametrize("fused", [True, False])
def test_greedy_answers_are_the_cpus(lm: str, fused: bool) -> None:
    asked = prompts([[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 3], [12, 13, 14]])
    said = []
    for place in (CPU, GPU):
        actor = load_actor(lm, dtype="float64", place=place)
        engine = HfEngine(actor.model, actor.tokenizer, actor.stop_ids, batch_size=3, fused=fused)
        said.append(engine.generate(asked, n=2, temperature=0.0, top_p=1.0, max_new_tokens=24, seed=0))
    for mine, theirs in zip(*said, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()
            assert abs(one.log_probs - other.log_probs).max() < 1e-5


@pytest.mark.parametrize(("source", "target"), [(CPU, GPU), (GPU, CPU), (GPU, GPU)])
def test_a_snapshot_goes_from_one_device_to_another(
    lm: str, tmp_path: Path, source: Place, target: Place
) -> None:
    first, experience, _ = updated(lm, source)
    for role in ("critic", "actor"):
        first.apply(role)
    tensors, meta = first.state()
    write_alone(tmp_path, tensors)
    kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    actor, critic = models(lm, place=target)
    second = learner_of(first.recipe, actor, critic)
    second.restore(kept, meta)
    found, _ = second.state()
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in kept.items())
    update = Update("actor", tuple(range(ROWS)), 1)
    losses = []
    for learner in (first, second):
        losses.append(learner.backward(update, experience)["actor/loss"])
        learner.apply("actor")  # moments lie where the weights do
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-5)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """This process as the only rank of a run on GPUs."""
    take_own_gpu(1)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_tensor_is_exchanged_where_it_lies(world: Any) -> None:
    group = Group()
    assert group.sum([1.0, 2.5]) == [1.0, 2.5]
    for device in ("cpu", "cuda"):
        there = torch.arange(4.0, device=device)
        assert torch.equal(group.add(there.clone()), there)
    parts = torch.arange(6.0, device="cuda").view(1, 6)
    assert torch.equal(group.exchange(parts), parts)


@pytest.mark.parametrize("offload", [False, True])
def test_an_update_that_fsdp_cuts_is_the_plain_one(world: Any, lm: str, offload: bool) -> None:
    plain, _, said = updated(lm, GPU)
    actor, critic = models(lm, place=GPU)
    for model in (actor, critic):
        fsdp.shard(model.whole, list(model.model.model.layers), 1, offload=offload)
    waits = {parameter.to_local().device.type for parameter in actor.model.parameters()}  # type: ignore[attr-defined]
    assert waits == {"cpu" if offload else "cuda"}
    experience = experience_of(plain.recipe, actor, critic, trajectories())
    learner = learner_of(plain.recipe, actor, critic)
    for role in ("critic", "actor"):
        metrics = learner.backward(Update(role, tuple(range(ROWS)), 0), experience)
        for name, value in said[role].items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        learner.apply(role)
    tensors, meta = learner.state()
    whole = {
        name: t.full_tensor().cpu() if hasattr(t, "full_tensor") else t.cpu() for name, t in tensors.items()
    }
    learner.restore(whole, meta)
    learner.backward(Update("actor", tuple(range(ROWS)), 1), experience)
    learner.apply("actor")


def test_liger_computes_the_same(lm: str) -> None:
    pytest.importorskip("liger_kernel")
    plain, mine, _ = updated(lm, GPU)
    with_it, theirs, _ = updated(lm, Place("cuda", liger=True))
    assert (mine.old_log_probs - theirs.old_log_probs).abs().max() < 1e-3
    assert near(gradients(with_it), gradients(plain)) < 1e-3
    on_cpu = load_actor(lm)  # is left alone
    rows = trajectories()
    found = on_cpu.log_probs(rows, torch.tensor([row.temperature for row in rows]))[0]
    assert (found.detach() - mine.old_log_probs).abs().max() < 1e-3


def test_the_demo_gets_better_on_the_gpu(tmp_path: Path) -> None:
    words = ["demo", f"out={tmp_path}", "model.device=cuda"]
    subprocess.run([sys.executable, "-m", "rein", *words], check=True)
    said = json.loads((tmp_path / "summary.json").read_text())
    assert said["after"]["accuracy"] > said["before"]["accuracy"]
