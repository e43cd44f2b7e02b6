"""A tiny Qwen2-shaped model and character tokenizer made on the spot: the demo's start, the tests' models."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rein.model_files import open_weights
from rein.models.attention import register

SPECIALS = ["<pad>", "<eos>", "<unk>"]


def tiny_tokenizer(characters: str = "0123456789+-=;#") -> PreTrainedTokenizerFast:
    """One token per character, PAD and EOS apart, no template: prompts are raw text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def make_tiny(
    folder: Path,
    *,
    seed: int,
    hidden: int = 128,
    layers: int = 3,
    characters: str = "0123456789+-=;#",
) -> Path:
    """Write a fresh Qwen2 model (by default 0.6M parameters; 4 heads over 2, tied) and its tokenizer."""
    register()  # keeps transformers' bars off the terminal
    tokenizer = tiny_tokenizer(characters)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    open_weights(folder)
    tokenizer.save_pretrained(str(folder))
    return folder
