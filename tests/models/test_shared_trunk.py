"""A critic on the actor's weights is the critic of a model of its own, and neither role feels the other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rows_made import VOCABULARY, prompts, random_rows
from torch import Tensor, nn
from training_made import gradients, moved
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GraniteConfig

from rein.config.recipe import Optim
from rein.engines.hf import HfEngine
from rein.errors import CheckpointError, ConfigError
from rein.models.actor import Actor, load_actor
from rein.models.critic import Critic, critic_on, load_critic
from rein.models.lora import adapters_off
from rein.models.reference import Reference
from rein.models.tiny import tiny_tokenizer
from rein.runtime.optimizer import Optimizer

ROWS = random_rows(6, seed=5)
ONES = torch.ones(6)
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 6}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"enable_gradient_checkpointing": True},
    "adapters on few layers": {"target_modules": ["q_proj", "down_proj"]},
    "adapters on the embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
}
kinds = pytest.mark.parametrize("options", list(KINDS.values()), ids=list(KINDS))
pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")  # peft's


def pair(path: str, *, apart: bool = False, **more: Any) -> tuple[Actor, Critic]:
    """Both roles away from the start, the critic with a model of its own or on the actor's."""
    loading: dict[str, Any] = {"dtype": "float64"} if "precision" not in more else {}
    loading |= {"precision": more.pop("precision")} if "precision" in more else {}
    options = LORA | more
    actor = load_actor(path, seed=1, **loading, **options)
    critic = load_critic(path, seed=2, **loading, **options) if apart else critic_on(actor, seed=2, **options)
    moved(actor.model, 3, size=0.3)
    moved(critic.model, 4, size=0.3)
    return actor, critic


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def near(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@kinds
def test_it_begins_as_the_critic_of_the_same_folder_and_seed(options: dict[str, Any], tiny_lm: str) -> None:
    actor, own = load_actor(tiny_lm, **LORA | options), load_critic(tiny_lm, seed=2, **LORA | options)
    drawn = torch.get_rng_state()
    critic = critic_on(actor, seed=2, **LORA | options)
    assert torch.equal(torch.get_rng_state(), drawn)
    one, other = dict(critic.model.named_parameters()), dict(own.model.named_parameters())
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(trained(critic.model)) == list(trained(own.model))
    assert critic.model.training
    assert not critic.values(ROWS).any()


def test_nothing_but_adapters_and_head_is_added(tiny_lm: str) -> None:
    actor, critic = pair(tiny_lm)
    actors = {id(parameter) for parameter in actor.model.parameters()}
    added = {name for name, p in critic.model.named_parameters() if id(p) not in actors}
    assert added == set(trained(critic.model))
    assert "score.weight" in added
    assert all(".lora_" in name for name in added - {"score.weight"})
    assert not set(map(id, trained(critic.model).values())) & actors
    assert all(".lora_" in name for name in trained(actor.model))


@kinds
def test_values_and_gradients_are_those_of_a_critic_apart(options: dict[str, Any], tiny_lm: str) -> None:
    found = []
    for apart in (False, True):
        _, critic = pair(tiny_lm, apart=apart, **options)
        values = critic.values(ROWS)
        values.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([values.detach(), *gradients(critic.model)])
        assert values.abs().max() > 0.1
        assert len(found[-1]) == 1 + len(trained(critic.model))
    near(*found)


@kinds
def test_the_actor_says_the_same_whatever_the_critic_has_become(
    options: dict[str, Any], tiny_lm: str
) -> None:
    actor, critic = pair(tiny_lm, **options)
    start = load_actor(tiny_lm, dtype="float64")
    moved(critic.model, 5, size=1.0)
    critic.values(ROWS)
    with torch.no_grad():
        alone = pair(tiny_lm, apart=True, **options)[0].log_probs(ROWS, ONES)[0]
        assert torch.equal(actor.log_probs(ROWS, ONES)[0], alone)
        reference = Reference(actor)
        assert torch.equal(reference.hidden(ROWS), start.hidden(ROWS)[1])
        with adapters_off(actor.model):
            assert torch.equal(actor.log_probs(ROWS, ONES)[0], start.log_probs(ROWS, ONES)[0])
            within = critic.values(ROWS)
        assert torch.equal(critic.values(ROWS), within)  # the critic's are not off with them


@pytest.mark.parametrize("checkpointing", [False, True])
def test_roles_may_interleave_and_leave_no_gradient_in_each_other(checkpointing: bool, tiny_lm: str) -> None:
    """Blocks are run again in the backward pass: of the role whose loss it is, whatever came between."""
    wanted = []
    for role in (0, 1):
        models = pair(tiny_lm, apart=True, enable_gradient_checkpointing=checkpointing)
        said = models[0].log_probs(ROWS, ONES)[0] if role == 0 else models[1].values(ROWS)
        said.square().sum().backward()  # type: ignore[no-untyped-call]
        wanted.append(gradients(models[role].model))
    actor, critic = pair(tiny_lm, enable_gradient_checkpointing=checkpointing)
    reference = Reference(actor)
    log_probs, values = actor.log_probs(ROWS, ONES)[0], critic.values(ROWS)
    reference.hidden(ROWS)
    log_probs.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in critic.model.parameters())
    near(gradients(actor.model), wanted[0])
    actor.log_probs(ROWS, ONES)
    with adapters_off(actor.model):
        values.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in actor.model.parameters())
    near(gradients(critic.model), wanted[1])


def test_each_optimizer_holds_and_moves_its_own_parameters(tiny_lm: str) -> None:
    actor, critic = pair(tiny_lm)
    before = {id(p): p.detach().clone() for m in (actor.model, critic.model) for p in m.parameters()}
    optimizer = Optimizer(critic.model, Optim(lr=0.1), grad_clip=1.0, total_steps=1)
    other = Optimizer(actor.model, Optim(lr=0.1), grad_clip=1.0, total_steps=1)
    assert not set(map(id, optimizer.parameters)) & set(map(id, other.parameters))
    critic.values(ROWS).square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.apply(optimizer.grad_norm())
    changed = {name for name, p in critic.model.named_parameters() if not torch.equal(p, before[id(p)])}
    assert changed == {name for name, _ in optimizer.named}
    assert all(torch.equal(p, before[id(p)]) for p in actor.model.parameters())


def test_answers_are_decoded_with_the_actor_s_adapters_alone(tiny_lm: str) -> None:
    asked = prompts([[3, 4, 5], [7]])
    found = []
    for apart in (False, True):
        actor, critic = pair(tiny_lm, apart=apart)
        critic.values(ROWS)
        engine = HfEngine(actor.model, actor.tokenizer, [])
        answers = engine.generate(asked, n=2, temperature=1.0, top_p=1.0, max_new_tokens=5, seed=0)
        found.append([answer.response_ids.tolist() for some in answers for answer in some])
    assert found[0] == found[1]


@kinds
def test_the_saved_folder_is_that_of_a_critic_apart(
    options: dict[str, Any], tiny_lm: str, tmp_path: Path
) -> None:
    for apart in (False, True):
        _, critic = pair(tiny_lm, apart=apart, **options)
        critic.save(tmp_path / str(apart))
    names = sorted(file.name for file in (tmp_path / "True").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "False").iterdir())
    for name in names:
        assert (tmp_path / "False" / name).read_bytes() == (tmp_path / "True" / name).read_bytes(), name
    with torch.no_grad():
        expected = critic.values(ROWS)
        back = load_critic(str(tmp_path / "False"), dtype="float64")
        torch.testing.assert_close(back.values(ROWS), expected, atol=1e-9, rtol=1e-9)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "False")
    assert plain.score.out_features == 1
    assert plain.state_dict().keys() == load_critic(tiny_lm).model.state_dict().keys()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fast_copies_are_shared_and_follow_each_role_s_steps(checkpointing: bool, tiny_lm: str) -> None:
    ends = []
    more = {"precision": "fast", "enable_gradient_checkpointing": checkpointing}
    for apart in (False, True):
        actor, critic = pair(tiny_lm, apart=apart, **more)
        for role in (critic, actor) * 3:
            optimizer = Optimizer(role.model, Optim(lr=0.05), grad_clip=1.0, total_steps=9)
            said = role.values(ROWS) if role is critic else actor.log_probs(ROWS, ONES)[0]
            said.square().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.apply(optimizer.grad_norm())
        with torch.no_grad():
            ends.append([critic.values(ROWS), actor.log_probs(ROWS, ONES)[0]])
        copies = [{id(copy) for _, copy in m.model.half_copies.copies.values()} for m in (actor, critic)]
        beneath = {id(p) for p in actor.model.parameters()} & {id(p) for p in critic.model.parameters()}
        assert len(copies[0] & copies[1]) == len(beneath)
        assert bool(beneath) != apart
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_trunk_that_is_trained_is_not_shared(tiny_lm: str) -> None:
    actor = load_actor(tiny_lm)
    with pytest.raises(ConfigError, match=r"critic\.model\.share_trunk: the actor trains its trunk; write"):
        critic_on(actor, **LORA)
    assert all(p.requires_grad for p in actor.model.parameters())


def test_an_architecture_without_a_value_model_is_named(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    actor = load_actor(str(tmp_path), **LORA)
    with pytest.raises(CheckpointError, match=r"cannot stand on the trunk of a granite model .*write false"):
        critic_on(actor, **LORA)
