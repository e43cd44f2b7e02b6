"""Compiled blocks say what the model's own say, with the same gradients, whatever the pack."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from rows_made import Row, random_rows
from torch import Tensor
from torch._dynamo.utils import counters
from training_made import gradients, models, moved

from rein.errors import ConfigError
from rein.models.actor import Actor, load_actor
from rein.models.compiled import compile_blocks, refuse_without_compiler
from rein.models.critic import Critic, load_critic
from rein.models.load import trunk_of
from rein.models.reference import Reference
from rein.models.reward_model import load_reward_model

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's, of its own parts
ROWS = random_rows(9, seed=4)
PACKS = (ROWS, ROWS[:4], ROWS[2:])
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "checkpointing": {"enable_gradient_checkpointing": True},
    "LoRA": {"lora_rank": 2},
    "LoRA, checkpointing": {"lora_rank": 2, "enable_gradient_checkpointing": True},
    "fast": {"precision": "fast"},
    "fast, LoRA, checkpointing": {
        "precision": "fast",
        "lora_rank": 2,
        "enable_gradient_checkpointing": True,
    },
}


def made(path: str, backend: str | None, **options: Any) -> tuple[Actor, Critic]:
    """Both roles a little elsewhere than they start; compiled for a backend."""
    actor, critic = models(path, **options)
    for role in (actor, critic):
        moved(role.model, 3)
        if backend is not None:
            compile_blocks(role.model, backend=backend)
    return actor, critic


def everything(actor: Actor, critic: Critic, rows: Sequence[Row]) -> list[Tensor]:
    """Log-probs, values and all gradients; and that a pass without gradients says the same."""
    ones = torch.ones(len(rows))
    log_probs, values = actor.log_probs(rows, ones)[0], critic.values(rows)
    (log_probs.sum() + values.square().sum()).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        assert torch.equal(actor.log_probs(rows, ones)[0], log_probs)
        assert torch.equal(critic.values(rows), values)
    return [log_probs.detach(), values.detach(), *gradients(actor.model), *gradients(critic.model)]


def held_against_its_own(path: str, backend: str, **options: Any) -> None:
    own, compiled = made(path, None, **options), made(path, backend, **options)
    near = 0.05 if options.get("precision") == "fast" else 1e-4
    graphs = []
    for rows in PACKS:
        for one, other in zip(everything(*own, rows), everything(*compiled, rows), strict=True):
            assert (one - other).norm() <= near * one.norm()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2], "a pack of another shape is compiled anew"


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["checkpointing", "fast"])
def test_compiled_blocks_say_what_the_models_own_say(kind: str, tiny_lm: str) -> None:
    held_against_its_own(tiny_lm, "aot_eager", **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("options", list(KINDS.values()), ids=list(KINDS))
def test_so_do_those_that_are_compiled_to_cpp(options: dict[str, Any], tiny_lm: str) -> None:
    held_against_its_own(tiny_lm, "inductor", **options)


@pytest.mark.long
def test_all_blocks_share_their_graphs_and_generation_compiles_nothing(tiny_lm: str) -> None:
    actor = load_actor(tiny_lm)
    names, ids = list(actor.model.state_dict()), torch.tensor([[3, 4, 5, 6]])
    compile_blocks(actor.model, backend="eager")
    assert list(actor.model.state_dict()) == names
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        actor.model(input_ids=ids, attention_mask=torch.ones_like(ids))
        assert counters["stats"]["unique_graphs"] == before
        actor.log_probs(ROWS, torch.ones(len(ROWS)))
    made = counters["stats"]["unique_graphs"] - before
    assert 0 < made <= 4  # before and after attention, of the block and of its part; not of each layer


@pytest.mark.long
def test_a_copy_of_a_compiled_model_is_its_own(tiny_lm: str) -> None:
    """As the reference that an exact KL is held against."""
    actor = load_actor(tiny_lm)
    compile_blocks(actor.model, backend="eager")
    reference = Reference(actor)
    before = reference.hidden(ROWS)
    moved(actor.model, 3)
    assert torch.equal(reference.hidden(ROWS), before)
    assert not torch.equal(actor.hidden(ROWS)[1], before)


def test_a_machine_without_a_compiler_is_told_what_it_lacks(
    tiny_lm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nowhere/g++",))
    refuse_without_compiler.cache_clear()
    for load in (load_actor, load_critic, load_reward_model):
        with pytest.raises(
            ConfigError, match=r"^model\.use_torch_compile: .*/nowhere/g\+\+.*; install a C\+\+"
        ):
            load(tiny_lm, use_torch_compile=True)


def test_a_model_without_blocks_is_refused(tiny_lm: str) -> None:
    model = load_actor(tiny_lm).model
    trunk_of(model).layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match="no decoder blocks are found in a qwen2 model; write false"):
        compile_blocks(model, backend="eager")
