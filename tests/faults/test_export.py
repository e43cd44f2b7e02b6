"""B10, B11: tokenizer, template and stop ids through save, fuse and export; vocabularies of other sizes.

B49, adapters on tied and untied models, is tests/models/test_adapters.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rein.config.load import load
from rein.config.recipe import Data
from rein.data.loader import load_prompts
from rein.data.tokenize import Encoder
from rein.errors import ReinError
from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.models.load import load_tokenizer, stop_ids
from rein.models.reference import Reference
from rein.models.reward_model import load_reward_model
from rein.stages import export
from rein.tracking.console import Console

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)
CHAT = [{"role": "user", "content": "12+3"}, {"role": "assistant", "content": "15"}]


# ---- B10: the saved tokenizer has lost its template or stop id


@pytest.fixture(params=["own file", "in the configuration"])
def chat(request: pytest.FixtureRequest, tiny_lm: str, tmp_path: Path) -> Path:
    """A model with a template, an added end token, left padding and two stop ids."""
    folder = Path(shutil.copytree(tiny_lm, tmp_path / "chat"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "left"
    tokenizer.save_pretrained(folder, save_jinja_files=request.param == "own file")
    assert (folder / "chat_template.jinja").exists() == (request.param == "own file")
    end = tokenizer.convert_tokens_to_ids("<end>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end], "top_k": 7}))
    return load_actor(str(folder)).path and folder


def same_tokenizer(folder: Path, first: Path) -> None:
    one, other = AutoTokenizer.from_pretrained(first), AutoTokenizer.from_pretrained(folder)
    for generation in (False, True):
        rendered = [
            t.apply_chat_template(CHAT, add_generation_prompt=generation, tokenize=True, return_dict=False)
            for t in (one, other)
        ]
        assert rendered[0] == rendered[1]
    assert other.get_vocab() == one.get_vocab()
    assert (other.padding_side, other.pad_token_id, other.eos_token_id) == (
        *(one.padding_side, one.pad_token_id),
        one.eos_token_id,
    )
    ends = stop_ids(str(first), load_tokenizer(str(first)))
    assert stop_ids(str(folder), load_tokenizer(str(folder))) == ends
    assert len(ends) == 2


def export_of(source: Path, out: Path, *words: str) -> Path:
    recipe = load(None, [f"out={out}", f"model.path={source}", f"export.path={source}", *words])[0]
    export.run(recipe, Console(quiet=True))
    return out / "export" / "model"


@pytest.mark.filterwarnings("ignore")  # peft's, of new rows
def test_every_stage_renders_the_same_ids_and_ends_at_the_same(chat: Path, tmp_path: Path) -> None:
    load_actor(str(chat)).save(tmp_path / "sft")  # fine-tuned
    same_tokenizer(tmp_path / "sft", chat)
    load_actor(str(tmp_path / "sft"), lora_rank=2).save(tmp_path / "lora")  # adapters fused at save
    same_tokenizer(tmp_path / "lora", chat)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapter.save_pretrained(tmp_path / "adapter")  # peft writes no tokenizer
    for source in ("sft", "lora", "adapter"):
        folder = export_of(tmp_path / source, tmp_path / f"{source}-run")
        same_tokenizer(folder, chat)
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation["eos_token_id"] == stop_ids(str(chat), load_tokenizer(str(chat)))
        assert generation["top_k"] == 7
        plain = AutoModelForCausalLM.from_pretrained(folder)
        assert plain.generation_config.eos_token_id == generation["eos_token_id"]


# ---- B11: tokenizer and embedding sizes differ


def with_rows(tiny_lm: str, target: Path, rows: int, *tokens: str) -> Path:
    """The tiny model with so many rows, and a tokenizer with these tokens more."""
    shutil.copytree(tiny_lm, target)
    model = AutoModelForCausalLM.from_pretrained(tiny_lm)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(target)
    return target


LOADERS: list[Callable[..., Any]] = [load_actor, load_critic, load_reward_model]


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_more_rows_than_tokens_stay(loader: Callable[..., Any], tiny_lm: str, tmp_path: Path) -> None:
    folder = with_rows(tiny_lm, tmp_path / "wide", 128)
    made = loader(str(folder))
    assert made.model.get_input_embeddings().num_embeddings == 128
    made.save(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert next(tensor for name, tensor in tensors.items() if "embed_tokens" in name).shape[0] == 128


def test_new_tokens_grow_every_model_alike(tiny_lm: str, tmp_path: Path) -> None:
    rows = len(AutoTokenizer.from_pretrained(tiny_lm))
    folder = with_rows(tiny_lm, tmp_path / "narrow", rows, "<new>", "<pad2>")
    tables = [loader(str(folder)).model.get_input_embeddings().weight for loader in LOADERS]
    for table in tables:
        assert table.shape[0] == rows + 2
        assert torch.equal(table, tables[0])
    mean = tables[0][:rows].mean(0)
    assert torch.allclose(tables[0][rows:], mean.expand(2, -1))
    actor = load_actor(str(folder))
    assert actor.vocabulary == rows + 2
    assert Reference(actor)._head(torch.zeros(1, mean.shape[0])).shape == (1, rows + 2)
    critic = load_actor(str(folder), lora_rank=2)
    assert critic.vocabulary == rows + 2
    actor.save(tmp_path / "saved")
    again = load_actor(str(tmp_path / "saved"))
    assert torch.equal(again.model.get_input_embeddings().weight, tables[0])


def test_growing_draws_no_random_number(tiny_lm: str, tmp_path: Path) -> None:
    rows = len(AutoTokenizer.from_pretrained(tiny_lm))
    folder = with_rows(tiny_lm, tmp_path / "narrow", rows, "<new>")
    found = []
    for path in (tiny_lm, str(folder)):
        torch.manual_seed(5)
        load_actor(path)
        found.append(torch.rand(3))
    assert torch.equal(*found)


def test_an_untied_head_grows_with_its_embeddings(tiny_lm: str, tmp_path: Path) -> None:
    rows = len(AutoTokenizer.from_pretrained(tiny_lm))
    folder = with_rows(tiny_lm, tmp_path / "narrow", rows, "<new>")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    head = load_actor(str(folder)).model.get_output_embeddings().weight
    assert head.shape[0] == rows + 1
    assert torch.allclose(head[-1], tensors["lm_head.weight"].mean(0))


def test_a_stored_id_outside_of_the_vocabulary_is_an_error_with_its_row(tiny_lm: str, tmp_path: Path) -> None:
    actor = load_actor(str(with_rows(tiny_lm, tmp_path / "wide", 128)))
    encoder = Encoder(
        actor.tokenizer,
        apply_chat_template=None,
        stop_ids=set(actor.stop_ids),
        vocab_size=actor.vocabulary,
    )
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1", "prompt_ids": [3, i]}) + "\n" for i in (127, 128)))
    loaded = load_prompts([str(file)], encoder, Data(max_bad_fraction=1.0))
    assert [row.prompt_ids.tolist() for row in loaded.rows] == [[3, 127]]
    assert [str(reject) for reject in loaded.rejects] == [
        "prompts.jsonl row 1: prompt_ids[1] is 128, vocabulary 128"
    ]
    with pytest.raises(ReinError, match="row 1"):
        load_prompts([str(file)], encoder, Data())
