"""Adapters learn, the start policy stays beneath them, and fusing gives the model with them."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rows_made import own_log_probs, random_rows
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rein.config.recipe import Optim
from rein.models.actor import Actor, load_actor
from rein.models.critic import load_critic
from rein.models.lora import adapters_off, add_lora, fused_state_dict
from rein.models.reward_model import load_reward_model
from rein.runtime.optimizer import Optimizer

ROWS = random_rows(4)
ONES = torch.ones(4)


def move_adapters(actor: Actor) -> None:
    """As training would: B away from zero."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(actor.model.named_parameters()):
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(i))


def said(actor: Actor) -> Tensor:
    with torch.no_grad():
        return actor.log_probs(ROWS, ONES)[0]


def test_new_adapters_change_nothing_and_alone_are_trained(tiny_lm: str) -> None:
    plain, adapted = load_actor(tiny_lm), load_actor(tiny_lm, lora_rank=4)
    assert torch.equal(said(plain), said(adapted))
    trained = [name for name, p in adapted.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    layers = {name.split(".")[-4] for name in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_seed_makes_the_same_adapters(tiny_lm: str) -> None:
    one, same, other = (dict(load_actor(tiny_lm, lora_rank=4, seed=s).model.state_dict()) for s in (1, 1, 2))
    names = [name for name in one if "lora_A" in name]
    assert all(torch.equal(one[name], same[name]) for name in names)
    assert not any(torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize("load", [load_actor, load_critic, load_reward_model], ids=lambda f: f.__name__)
def test_with_gradient_checkpointing_every_b_moves_and_blocks_are_run_again(load, tiny_lm: str) -> None:  # type: ignore[no-untyped-def]
    made = load(tiny_lm, lora_rank=4, enable_gradient_checkpointing=True)
    optimizer = Optimizer(made.model, Optim(lr=1e-2), grad_clip=1.0, total_steps=1)
    if load is not load_actor:
        with torch.no_grad():
            made.model.score.weight.fill_(0.1)
    runs = []
    block = made.model.model.layers[0].mlp
    block.register_forward_pre_hook(lambda *_: runs.append(1))
    before = {name: p.detach().clone() for name, p in optimizer.named}
    if load is load_actor:
        loss = -made.log_probs(ROWS, ONES)[0].sum()
    elif load is load_critic:
        loss = (made.values(ROWS) - 1).square().sum()
    else:
        loss = made.scores(ROWS).sum()
    loss.backward()
    assert len(runs) == 2  # forward, and again for the backward pass: the memory setting is active
    assert all(p.grad is not None for p in optimizer.parameters)
    optimizer.apply(optimizer.grad_norm())
    for name, parameter in optimizer.named:
        if "lora_B" in name or "score" in name:
            assert not torch.equal(parameter, before[name]), name


def test_gradient_checkpointing_changes_no_gradient(tiny_lm: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        actor = load_actor(tiny_lm, dtype="float64", enable_gradient_checkpointing=checkpointing)
        actor.log_probs(ROWS, ONES)[0].square().sum().backward()
        gradients.append([p.grad for p in actor.model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_with_adapters_off_the_model_is_the_start_policy_and_they_come_back(tiny_lm: str) -> None:
    start = said(load_actor(tiny_lm))
    actor = load_actor(tiny_lm, lora_rank=4)
    move_adapters(actor)
    moved = said(actor)
    assert (moved - start).abs().max() > 0.1
    with adapters_off(actor.model):
        assert torch.equal(said(actor), start)
    assert torch.equal(said(actor), moved)


def test_adapters_come_back_after_an_error(tiny_lm: str) -> None:
    actor = load_actor(tiny_lm, lora_rank=4)
    move_adapters(actor)
    moved = said(actor)

    def fail() -> None:
        with adapters_off(actor.model):
            raise RuntimeError("in the reference pass")

    with pytest.raises(RuntimeError, match="in the reference pass"):
        fail()
    assert torch.equal(said(actor), moved)
    assert any(p.requires_grad for p in actor.model.parameters())


@pytest.fixture
def sft_adapter(tiny_lm: str, tmp_path: Path) -> tuple[str, torch.nn.Module]:
    """A folder that holds only an adapter, as peft writes it, and the model that wrote it."""
    base = AutoModelForCausalLM.from_pretrained(tiny_lm)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        model = get_peft_model(base, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    folder = tmp_path / "sft"
    model.save_pretrained(folder)
    actor = load_actor(tiny_lm)
    actor.tokenizer.save_pretrained(str(folder))
    return str(folder), model.eval()


def test_an_adapter_s_folder_is_read_with_its_adapter(sft_adapter: tuple[str, torch.nn.Module]) -> None:
    folder, model = sft_adapter
    found = said(load_actor(folder))
    with torch.no_grad():
        for i, some in enumerate(ROWS):
            own = own_log_probs(model, some)
            torch.testing.assert_close(found[i, : len(own)], own, atol=1e-5, rtol=0)


def test_training_on_from_an_adapter_keeps_it_beneath_the_new_one(
    sft_adapter: tuple[str, torch.nn.Module], tiny_lm: str
) -> None:
    """The reference is the policy one started from, not the bare model: the KL at step 0 is 0."""
    folder, _ = sft_adapter
    start = said(load_actor(folder))
    actor = load_actor(folder, lora_rank=4)
    assert torch.equal(said(actor), start)
    move_adapters(actor)
    with adapters_off(actor.model):
        assert torch.equal(said(actor), start)
    assert (said(load_actor(tiny_lm)) - start).abs().max() > 0.1


def test_a_reward_model_s_adapter_is_read_with_its_head(tiny_lm: str, tmp_path: Path) -> None:
    base = load_reward_model(tiny_lm)
    base.tokenizer.save_pretrained(str(tmp_path))
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"], task_type="SEQ_CLS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(base.model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "score.modules_to_save" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    scores = load_reward_model(str(tmp_path)).scores(ROWS)
    ids = [torch.from_numpy(np.concatenate([some.prompt_ids, some.response_ids]))[None] for some in ROWS]
    with torch.no_grad():
        own = torch.cat([model(input_ids=i, attention_mask=torch.ones_like(i)).logits[0] for i in ids])
    assert own.std() > 0.01
    torch.testing.assert_close(scores, own, atol=1e-5, rtol=1e-5)


TARGETS = ["all-linear", ["q_proj", "v_proj"], ["q_proj", "lm_head"], ["embed_tokens", "down_proj"]]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_the_saved_model_is_the_adapted_one(targets: str | list[str], tiny_lm: str, tmp_path: Path) -> None:
    actor = load_actor(tiny_lm, lora_rank=4, lora_alpha=6, target_modules=targets)
    move_adapters(actor)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if "lora_embedding" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(9))
    expected = said(actor)
    actor.save(tmp_path / "fused")
    torch.testing.assert_close(said(actor), expected, atol=0, rtol=0)
    torch.testing.assert_close(said(load_actor(str(tmp_path / "fused"))), expected, atol=1e-5, rtol=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    weights = load_file(tmp_path / "fused" / "model.safetensors")
    assert not any("lora" in name or "base_layer" in name for name in weights)
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert tied == plain.config.tie_word_embeddings == ("lm_head.weight" not in weights)
    if targets in TARGETS[:2]:
        assert tied
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


def test_fusing_computes_w_plus_scale_b_a() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(torch.eye(2))
    add_lora(layer, rank=1, alpha=3, target_modules=["0"], seed=0)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.tensor([[1.0, 2.0]]))
            if "lora_B" in name:
                parameter.copy_(torch.tensor([[1.0], [0.5]]))
    assert fused_state_dict(layer)["0.weight"].tolist() == [[4.0, 6.0], [1.5, 4.0]]


def test_reward_models_and_critics_train_their_head_beside_the_adapters(tiny_lm: str) -> None:
    for made in (load_critic(tiny_lm, lora_rank=2), load_reward_model(tiny_lm, lora_rank=2)):
        trained = {n for n, p in made.model.named_parameters() if p.requires_grad and ".lora_" not in n}
        assert trained == {"score.weight"}
