"""The tiny model and its tokenizer: what is written is what comes back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rein.models.load import load_tokenizer
from rein.models.tiny import SPECIALS, make_tiny, tiny_tokenizer


def test_each_character_is_a_token_and_unknown_ones_are_unk() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("12+3") == [4, 5, 13, 6]
    assert tokenizer.encode("1x 2\n") == [4, 2, 2, 5, 2]
    assert tokenizer.decode([4, 5, 13, 6, 1]) == "12+3<eos>"
    assert tokenizer.decode([4, 5, 1, 0, 0], skip_special_tokens=True) == "12"
    assert SPECIALS == ["<pad>", "<eos>", "<unk>"]


def test_the_tokenizer_comes_back_as_it_was(tiny_lm: str) -> None:
    made, back = tiny_tokenizer(), load_tokenizer(tiny_lm)
    for text in ("12+3=;#-", "1x 2\n", "", "äöü 1", "  ", "<eos>1"):
        assert back.encode(text) == made.encode(text)
    assert back.decode([4, 13, 2, 5]) == made.decode([4, 13, 2, 5]) == "1+<unk>2"
    assert (back.pad_token_id, back.eos_token_id, back.bos_token_id) == (0, 1, None)


def test_saving_it_again_changes_nothing(tiny_lm: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        source = tiny_lm if name == "first" else str(tmp_path / "first")
        load_tokenizer(source).save_pretrained(str(tmp_path / name))
        shutil.copy(Path(tiny_lm) / "config.json", tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        first = json.loads((tmp_path / "first" / file).read_text())
        assert first == json.loads((tmp_path / "second" / file).read_text())
        assert first == json.loads((Path(tiny_lm) / file).read_text())


def test_a_seed_makes_the_same_model_and_disturbs_no_generator(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny(tmp_path / name, seed=seed, hidden=32, layers=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not all(torch.equal(a[key], c[key]) for key in a)


@pytest.mark.parametrize("characters", ["01", "abcdefghij"])
def test_the_model_has_a_row_for_each_token_and_one_matrix_at_both_ends(
    characters: str, tmp_path: Path
) -> None:
    make_tiny(tmp_path, seed=0, hidden=32, layers=1, characters=characters)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (len(SPECIALS) + len(characters), 32)
    assert "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_default_has_about_six_hundred_thousand_parameters(tmp_path: Path) -> None:
    make_tiny(tmp_path, seed=0)
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert 5e5 < count < 7e5
