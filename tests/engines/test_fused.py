"""Which models decode with fused weights, and that each such kind decodes as transformers does."""

import numpy as np
import pytest
import torch
from rows_made import prompts, row
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rein.engines import kv_cache, slots
from rein.engines.board import Ask, Manner
from rein.engines.fused import readable
from rein.engines.hf import HfEngine
from rein.models.actor import load_actor
from rein.models.tiny import tiny_tokenizer
from rein.types import Completion

SHAPE = {
    "vocab_size": 600, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
READ: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama with one head each": LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama, one key head": LlamaConfig(**SHAPE | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama 3 positions": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "yarn positions": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "wide heads": LlamaConfig(**SHAPE, head_dim=10),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
}
NOT_READ: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=600, n_embd=24, n_layer=1, n_head=2),
    "sliding windows": MistralConfig(**SHAPE, sliding_window=8),
    "positions that depend on the length": LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}


def made(config: PretrainedConfig, std: float = 0.3) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=std)
    return model.eval()


TEXTS = [[3, 4, 500, 5], [7], [8] * 40]


@pytest.mark.parametrize("name", READ)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    model = made(READ[name])
    assert readable(model)
    engine = HfEngine(model, tiny_tokenizer(), [], batch_size=4)
    found = engine.generate(prompts(TEXTS), n=2, temperature=0.0, top_p=1.0, max_new_tokens=70, seed=0)
    for text, some in zip(TEXTS, found, strict=True):
        prompt = torch.tensor([text])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=70
        )  # fmt: skip
        for completion in some:
            assert completion.response_ids.tolist() == theirs[0, len(text) :].tolist()


ROOMS = [[70, 2, 33, 1], [50], [1, 1, 60], [20, 64, 5, 5], [3, 40]]
SHARED = [[3, 4, 500, 5], [9, 2], [7], [8] * 20 + [11] * 21, [6, 6, 6]]  # one token: nothing to share


@pytest.mark.parametrize("name", ["llama", "llama, one key head", "qwen2", "qwen3"])
@pytest.mark.parametrize("places", [1, 3, 6, 99])
def test_greedy_samples_that_end_at_very_different_times_are_those_of_transformers(
    name: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with one sample or several, in blocks that answers leave and move between."""
    monkeypatch.setattr(kv_cache, "ANSWERS", 4)
    monkeypatch.setattr(kv_cache, "PROMPTS", 2)
    monkeypatch.setattr(kv_cache, "ANSWER_COLUMNS", 8)
    model = made(READ[name])
    asks = [
        Ask(i, sample, np.array(SHARED[i]), room) for i in range(5) for sample, room in enumerate(ROOMS[i])
    ]
    answers: list[list[Completion | None]] = [[None] * len(rooms) for rooms in ROOMS]
    manner = Manner(0.0, 1.0, 0, np.array([], dtype=np.int64), (), tiny_tokenizer())
    with torch.no_grad():
        slots.decode(model, asks, places, manner, answers, lambda _: None)
    for text, rooms, found in zip(SHARED, ROOMS, answers, strict=True):
        prompt = torch.tensor([text])
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max(rooms)
        )  # fmt: skip
        for room, completion in zip(rooms, found, strict=True):
            assert completion is not None
            assert completion.response_ids.tolist() == theirs[0, len(text) : len(text) + room].tolist()


@pytest.mark.parametrize("name", NOT_READ)
def test_other_models_decode_through_transformers(name: str) -> None:
    model = made(NOT_READ[name])
    assert not readable(model)
    some = [
        HfEngine(model, tiny_tokenizer(), [], fused=fused).generate(
            prompts(TEXTS), n=2, temperature=1.0, top_p=1.0, max_new_tokens=12, seed=0
        )
        for fused in (True, False)
    ]
    one, other = ([c.response_ids.tolist() for s in found for c in s] for found in some)
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_decodes_in_its_own_precision(dtype: torch.dtype) -> None:
    model = made(READ["llama"], std=0.1).to(dtype)
    found = HfEngine(model, tiny_tokenizer(), []).generate(
        prompts(TEXTS), n=1, temperature=1.0, top_p=1.0, max_new_tokens=20, seed=0
    )
    for text, (completion,) in zip(TEXTS, found, strict=True):
        whole = torch.tensor([text + completion.response_ids.tolist()])
        with torch.no_grad():
            log_p = model(whole).logits[0, len(text) - 1 : -1].float().log_softmax(-1)
        expected = log_p.gather(-1, whole[0, len(text) :, None]).squeeze(-1)
        close = 1e-5 if dtype == torch.float64 else 0.1
        torch.testing.assert_close(torch.from_numpy(completion.log_probs), expected, atol=close, rtol=0)


def test_adapters_are_read_as_they_are_at_each_call(tiny_lm: str) -> None:
    """Weights move between calls; a copy kept from one to the next would answer as the model was."""
    actor = load_actor(tiny_lm, lora_rank=4)
    engine = HfEngine(actor.model, actor.tokenizer, [])
    assert readable(actor.model)
    for seed in range(2):
        with torch.no_grad():
            for name, parameter in actor.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(seed))
        ((completion,),) = engine.generate(
            prompts([[3, 4, 5]]), n=1, temperature=1.0, top_p=1.0, max_new_tokens=20, seed=0
        )
        with torch.no_grad():
            trained, _ = actor.log_probs([row([3, 4, 5], completion.response_ids.tolist())], torch.ones(1))
        torch.testing.assert_close(torch.from_numpy(completion.log_probs), trained[0], atol=1e-4, rtol=0)
