"""Folders are checked before they are loaded, saved whole, and lose nothing on the way."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from rows_made import random_rows
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from rein.drafts import replace_folder
from rein.errors import CheckpointError, ConfigError
from rein.model_files import weights_hash
from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.models.load import (
    load_causal_lm,
    load_tokenizer,
    model_folder,
    stop_ids,
)
from rein.models.tiny import tiny_tokenizer


@pytest.fixture
def copy(tiny_lm: str, tmp_path: Path) -> Path:
    """A folder to damage."""
    return Path(shutil.copytree(tiny_lm, tmp_path / "copy"))


@pytest.mark.parametrize("path", ["./missing", "missing/model", "/no/such/folder", "~/no-such-folder-here"])
def test_a_path_that_does_not_exist_is_told_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=rf"actor\.path: (path )?{path}"):
        model_folder(path, "actor.path")


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; give a Hugging Face model folder"):
        model_folder(str(tmp_path), "model.path")


@pytest.mark.parametrize("spoil", ["weights gone", "weights cut", "config damaged", "tokenizer gone"])
def test_a_damaged_folder_is_named(spoil: str, copy: Path) -> None:
    weights = copy / "model.safetensors"
    if spoil == "weights gone":
        weights.unlink()
    elif spoil == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif spoil == "config damaged":
        (copy / "config.json").write_text("{", encoding="utf-8")
    else:
        (copy / "tokenizer.json").unlink()
        (copy / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.path: .*copy"):
        load_actor(str(copy))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in ("generation_config.json", "tokenizer_config.json") for text in "{3"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("config.json", "{"),
        ("config.json", "null"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "null"),
        ("adapter_config.json", "{"),
        ("adapter_config.json", "{}"),
    ],
)
def test_a_damaged_setting_is_named_before_any_work(name: str, text: str, copy: Path) -> None:
    (copy / name).write_text(text)
    for load in (load_actor, load_critic):
        if load is load_critic and "eos" in text:
            continue  # a critic ends no response
        with pytest.raises(CheckpointError, match=r"copy.*; ") as caught:
            load(str(copy))
        assert caught.value.exit_code == 6


def test_weights_that_are_missing_are_never_made_up(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    lost = sorted(weights)[3]
    save_file({k: v for k, v in weights.items() if k != lost}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 weights are missing, first {lost}"):
        load_actor(str(copy))
    with pytest.raises(CheckpointError, match="1 weights are missing"):
        load_critic(str(copy))


def test_all_stop_ids_of_a_folder_are_found(copy: Path) -> None:
    tokenizer = load_tokenizer(str(copy))
    assert stop_ids(str(copy), tokenizer) == [1]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}), encoding="utf-8")
    assert stop_ids(str(copy), tokenizer) == [1, 7, 9]
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}), encoding="utf-8")
    assert stop_ids(str(copy), tokenizer) == [1, 9]
    (copy / "generation_config.json").unlink()
    assert stop_ids(str(copy), tokenizer) == [1]


def test_stop_ids_and_generation_settings_survive_a_save(copy: Path, tmp_path: Path) -> None:
    (copy / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, 9], "max_new_tokens": 33}), encoding="utf-8"
    )
    load_actor(str(copy)).save(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [1, 9]
    assert kept["max_new_tokens"] == 33
    assert load_actor(str(tmp_path / "saved")).stop_ids == [1, 9]


def test_the_chat_template_survives_a_save(copy: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(copy))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}#{% endfor %}"
    tokenizer.save_pretrained(str(copy))
    load_actor(str(copy)).save(tmp_path / "one")
    load_actor(str(tmp_path / "one"), lora_rank=2).save(tmp_path / "two")
    messages = [{"role": "user", "content": "1+2="}]
    ids = [
        load_tokenizer(str(f)).apply_chat_template(messages, return_dict=False)
        for f in (copy, tmp_path / "two")
    ]
    assert ids[0] == ids[1] == [4, 13, 5, 15, 17]


def test_a_tokenizer_without_pad_pads_with_eos(copy: Path) -> None:
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["pad_token"]
    file.write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(str(copy))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_no_dropout_is_left_anywhere(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=18, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=1,
        attn_pdrop=0.1, resid_pdrop=0.2, embd_pdrop=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype="float32")
    assert model.training
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


def test_a_saved_folder_is_what_was_saved_and_leaves_nothing_beside_it(tiny_lm: str, tmp_path: Path) -> None:
    actor = load_actor(tiny_lm)
    with torch.no_grad():
        actor.model.model.norm.weight.mul_(1.5)
    actor.save(tmp_path / "out" / "best")
    actor.save(tmp_path / "out" / "best")  # in place of the former one
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["best"]
    assert len({path.stat().st_mode for path in (tmp_path / "out" / "best").iterdir()}) == 1
    back = load_actor(str(tmp_path / "out" / "best"))
    rows = random_rows(3)
    assert torch.equal(back.log_probs(rows, torch.ones(3))[0], actor.log_probs(rows, torch.ones(3))[0])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "best")
    assert plain.config.use_cache
    assert "rein" not in (tmp_path / "out" / "best" / "config.json").read_text()
    assert actor.model.config._attn_implementation == "rein_packed"


def test_a_save_that_fails_leaves_the_former_folder(
    tiny_lm: str, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    actor = load_actor(tiny_lm)
    actor.save(tmp_path / "best")
    before = weights_hash(tmp_path / "best")
    with full_disk(20_000), pytest.raises(CheckpointError, match="best: cannot be saved"):
        actor.save(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert weights_hash(tmp_path / "best") == before
    assert actor.model.config._attn_implementation == "rein_packed"


def test_a_folder_takes_the_place_of_another_whole(tmp_path: Path) -> None:
    for name in ("draft", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
    replace_folder(tmp_path / "draft", tmp_path / "target")
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.*")] == ["target/draft.txt"]


def test_the_hash_of_a_folder_is_that_of_its_content(copy: Path, tiny_lm: str) -> None:
    first = weights_hash(Path(tiny_lm))
    assert weights_hash(copy) == first
    (copy / "notes.md").write_text("not part of the model")
    assert weights_hash(copy) == first
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(data))
    assert weights_hash(copy) != first


def test_folders_with_spaces_and_other_letters_are_read(tiny_lm: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_lm, tmp_path / "mein Modell äöü")
    assert load_actor(f"{folder}/").stop_ids == [1]


def test_a_critic_keeps_the_head_of_a_reward_model_and_only_of_it(tiny_lm: str, tmp_path: Path) -> None:
    critic = load_critic(tiny_lm)
    assert not critic.model.score.weight.any()
    with torch.no_grad():
        critic.model.score.weight.fill_(0.25)
    critic.save(tmp_path / "critic")
    assert (load_critic(str(tmp_path / "critic")).model.score.weight == 0.25).all()
    weights = load_file(tmp_path / "critic" / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "critic" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing, first score\.weight"):
        load_critic(str(tmp_path / "critic"))


def test_ids_and_embedding_rows_need_not_be_equal_in_number(tiny_lm: str, tmp_path: Path) -> None:
    """An embedding with spare rows is never cut."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm)
    model.resize_token_embeddings(32, mean_resizing=False)
    model.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    actor = load_actor(str(tmp_path / "wide"))
    assert (actor.vocabulary, len(actor.tokenizer)) == (32, 18)
    actor.save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")["model.embed_tokens.weight"].shape[0] == 32
