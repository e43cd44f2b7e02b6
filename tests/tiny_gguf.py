"""A tiny Qwen2 folder as a GGUF file in fp32, for llama.cpp."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

SPECIAL, PLAIN = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
OF_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, file: Path) -> Path:
    """`folder` holds a Qwen2 whose head is its embedding, and the tokenizer of models/tiny."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, folder, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if name != "lm_head.weight":
            writer.add_tensor(_name(name.removeprefix("model.")), np.asarray(weight, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict) -> None:  # type: ignore[type-arg]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([SPECIAL if len(token) > 1 else PLAIN for token in tokens])
    writer.add_token_merges(["0 1"])  # some must be there; ids are sent, so none is ever used
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)


def _name(name: str) -> str:
    if name == "embed_tokens.weight":
        return "token_embd.weight"
    if name == "norm.weight":
        return "output_norm.weight"
    _, block, rest = name.split(".", 2)
    layer, kind = rest.rsplit(".", 1)
    return f"blk.{block}.{OF_BLOCK[layer]}.{kind}"
