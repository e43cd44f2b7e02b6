"""What the policy says of packed rows is what the model itself says of each row alone."""

from pathlib import Path

import pytest
import torch
from rows_made import VOCABULARY, own_log_probs, random_rows, row
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_made import gradients_of
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    SmolLM3Config,
)

from rein.errors import ConfigError
from rein.models.actor import Actor, load_actor
from rein.models.load import head_function
from rein.models.tiny import tiny_tokenizer

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **SPECIAL),
    "mistral with a window of 4": MistralConfig(**SIZES, **SPECIAL, sliding_window=4),
    "qwen3": Qwen3Config(**SIZES, **SPECIAL),
    "smollm3 with a layer that turns and one that does not": SmolLM3Config(
        **SIZES, **SPECIAL, no_rope_layers=[1, 0]
    ),
    "gpt2 with dropout": GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.3, **SPECIAL
    ),
}


@pytest.fixture(scope="module")
def actor(tiny_lm: str) -> Actor:
    return load_actor(tiny_lm)


@pytest.fixture(scope="module")
def exact(tiny_lm: str) -> Actor:
    return load_actor(tiny_lm, dtype="float64")


def save(config: PreTrainedConfig, folder: Path) -> str:
    torch.manual_seed(0)
    model = Auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)  # as first drawn, weights are so small that all positions look alike
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_packed_rows_score_as_each_does_alone(actor: Actor) -> None:
    rows = random_rows(12)
    with torch.no_grad():
        packed, entropy = actor.log_probs(rows, torch.ones(12))
        assert entropy is None
        for i, some in enumerate(rows):
            length = len(some.response_ids)
            torch.testing.assert_close(
                packed[i, :length], own_log_probs(actor.model, some), atol=1e-5, rtol=0
            )
            assert packed[i, length:].tolist() == [0] * (packed.shape[1] - length)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_of_models_is_read_as_it_reads_itself(family: str, tmp_path: Path) -> None:
    other = load_actor(save(FAMILIES[family], tmp_path / "model"))
    rows = random_rows(8, seed=5)
    with torch.no_grad():
        packed, _ = other.log_probs(rows, torch.ones(8))
        for i, some in enumerate(rows):
            own = own_log_probs(other.model, some)
            torch.testing.assert_close(packed[i, : len(own)], own, atol=1e-5, rtol=0)


def test_a_family_that_packs_wrongly_is_refused(tmp_path: Path) -> None:
    config = Gemma2Config(**SIZES, **SPECIAL, query_pre_attn_scalar=4)
    folder = save(config, tmp_path / "model")
    with pytest.raises(ConfigError, match="soft cap is not supported on packed rows yet"):
        load_actor(folder)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
def test_packed_rows_do_not_see_each_other(actor: Actor, backend: SDPBackend) -> None:
    b = row([4, 5], [6, 7])
    with torch.no_grad(), sdpa_kernel(backend):
        one, _ = actor.log_probs([row([1, 2], [3]), b], torch.ones(2))
        other, _ = actor.log_probs([row([9, 8], [7]), b], torch.ones(2))
    torch.testing.assert_close(one[1], other[1], atol=1e-6, rtol=0)
    assert not torch.allclose(one[0], other[0], atol=1e-2)


def test_gradients_through_a_pack_are_those_of_the_rows_alone(exact: Actor) -> None:
    rows = random_rows(6, seed=1)
    packed, _ = exact.log_probs(rows, torch.ones(6))
    together = gradients_of(exact.model, packed.square().sum())
    alone = torch.stack([own_log_probs(exact.model, some).square().sum() for some in rows])
    apart = gradients_of(exact.model, alone.sum())
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_known_sequence_has_log_prob_0_at_every_token(tmp_path: Path) -> None:
    """A model that always says the id after the last one: a shift by one anywhere would show."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=VOCABULARY, n_layer=1, n_head=1, n_positions=64,
        tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    model = Auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(VOCABULARY))
        model.transformer.ln_f.weight.fill_(1)
        model.lm_head.weight.copy_(100 * torch.eye(VOCABULARY).roll(1, 0))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    counting = load_actor(str(tmp_path))
    with torch.no_grad():
        found, _ = counting.log_probs([row([3, 4], [5, 6, 7]), row([9], [10])], torch.ones(2))
    torch.testing.assert_close(found, torch.zeros(2, 3), atol=1e-5, rtol=0)


def test_log_probs_and_entropy_are_at_each_row_s_temperature(actor: Actor) -> None:
    rows = [row([3, 4], [5, 6, 7]), row([3, 4], [5, 6, 7]), row([8], [9, 1])]
    with torch.no_grad():
        found, entropy = actor.log_probs(rows, torch.tensor([0.6, 1.0, 2.0]), entropy=True)
        assert entropy is not None
        for i, temperature in enumerate((0.6, 1.0, 2.0)):
            own = own_log_probs(actor.model, rows[i], temperature)
            torch.testing.assert_close(found[i, : len(own)], own, atol=1e-5, rtol=0)
        ids = torch.tensor([[3, 4, 5, 6, 7]])
        logits = actor.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 1:-1]
    p = (logits / 0.6).softmax(-1)
    torch.testing.assert_close(entropy[0], -(p * p.log()).sum(-1), atol=1e-5, rtol=0)
    assert (entropy[0] < entropy[1]).all()
    assert entropy[2, 2].item() == 0


def test_the_chunked_head_changes_neither_values_nor_gradients(
    exact: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(6, seed=2)

    def everything() -> list[torch.Tensor]:
        found, entropy = exact.log_probs(rows, torch.full((6,), 0.7), entropy=True)
        assert entropy is not None
        return [found, entropy, *gradients_of(exact.model, (found * found + entropy).sum())]

    whole = everything()
    monkeypatch.setattr(exact, "logits_chunk", 3 * VOCABULARY)
    for one, other in zip(whole, everything(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_exact_kl_is_the_sum_over_the_vocabulary(tiny_lm: str, actor: Actor) -> None:
    moved = load_actor(tiny_lm)
    with torch.no_grad():
        for i, parameter in enumerate(moved.model.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
        rows, temperature = random_rows(5, seed=3), torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0])
        _, hidden = actor.hidden(rows)
        kl, _ = moved.exact_kl(rows, temperature, hidden, head_function(actor.model))
        for i, some in enumerate(rows):
            ids = torch.tensor([[*some.prompt_ids, *some.response_ids]])
            mask = torch.ones_like(ids)
            begin = len(some.prompt_ids) - 1
            log_p, log_q = (
                (
                    m.model(input_ids=ids, attention_mask=mask).logits[0, begin:-1] / temperature[i]
                ).log_softmax(-1)
                for m in (moved, actor)
            )
            expected = (log_p.exp() * (log_p - log_q)).sum(-1)
            torch.testing.assert_close(kl[i, : len(expected)], expected, atol=1e-5, rtol=1e-4)
        assert kl.max() > 0.01
        same, _ = actor.exact_kl(rows, temperature, hidden, head_function(actor.model))
        assert not same.any()


def test_the_model_starts_without_dropout_so_ratios_start_at_1(tmp_path: Path) -> None:
    other = load_actor(save(FAMILIES["gpt2 with dropout"], tmp_path / "model"))
    assert other.model.training
    rows = random_rows(4)
    assert torch.equal(other.log_probs(rows, torch.ones(4))[0], other.log_probs(rows, torch.ones(4))[0])
