"""Claims about the key of what a frozen model says: it changes when the numbers can, and only then."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rein.errors import ConfigError
from rein.models.identity import model_key

Change = Callable[[Path], object]


def key(folder: Path, dtype: str = "float32", device: str = "cpu") -> dict[str, str]:
    return model_key(str(folder), dtype=dtype, device=device, where="model.path")


@pytest.fixture
def copy(tiny_lm: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_lm, tmp_path / "copy"))


def in_json(name: str, **values: object) -> Change:
    def change(folder: Path) -> None:
        file = folder / name
        body = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(body | values, indent=8))

    return change


def one_weight(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    first = next(iter(state))
    state[first].view(-1)[0] += 1e-3
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def one_merge(folder: Path) -> None:
    body = json.loads((folder / "tokenizer.json").read_text())
    body["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(body))


CHANGES: dict[str, tuple[Change, str]] = {
    "a weight": (one_weight, "weights"),
    "the architecture": (in_json("config.json", rms_norm_eps=0.5), "configuration"),
    "the tokenizer": (one_merge, "tokenizer"),
    "the template's file": (lambda f: (f / "chat_template.jinja").write_text("{{ messages }} "), "template"),
    "the template in the settings": (in_json("tokenizer_config.json", chat_template="{{ 1 }}"), "template"),
    "its own code": (lambda f: (f / "modeling_x.py").write_text("x = 1"), "configuration"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_numbers_changes_its_part_of_the_key(name: str, copy: Path) -> None:
    change, part = CHANGES[name]
    before = key(copy)
    change(copy)
    after = key(copy)
    assert {fact for fact in before if before[fact] != after[fact]} == {part}


def test_the_numeric_path_is_part_of_the_key(copy: Path) -> None:
    assert key(copy)["numeric path"] == "float32 cpu rein_packed"
    assert (
        key(copy, "float64")["numeric path"]
        != key(copy)["numeric path"]
        != key(copy, device="cuda")["numeric path"]
    )
    ways = [("fast", False), ("exact", True), ("fast", True)]
    other = [
        model_key(str(copy), dtype="float32", device="cpu", where="", precision=precision, compiled=compiled)
        for precision, compiled in ways
    ]
    assert len({found["numeric path"] for found in (key(copy), *other)}) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda f: (f / "README.md").write_text("about"),
        in_json("config.json", transformers_version="9", _name_or_path="/elsewhere", use_cache=True),
        in_json("generation_config.json", temperature=0.3),
        in_json("manifest.json", stage="sft"),
        lambda f: (f / "model.safetensors").touch(),
        lambda f: f.rename(f.with_name("moved")).rename(f),
    ],
    ids=["notes", "whose", "generation", "manifest", "time", "moved"],
)
def test_what_changes_no_number_changes_nothing(change: Change, copy: Path, tiny_lm: str) -> None:
    assert key(copy) == key(Path(tiny_lm))
    change(copy)
    assert key(copy) == key(Path(tiny_lm))


def test_an_adapter_counts_with_its_base_wherever_that_lies(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    save_file({"lora_A": torch.ones(2, 2)}, tmp_path / "adapter" / "adapter_model.safetensors")
    in_json("adapter_config.json", base_model_name_or_path=str(copy), r=2)(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(copy / name, tmp_path / "adapter" / name)
    first = key(tmp_path / "adapter")
    assert first != key(copy)
    moved = copy.rename(tmp_path / "moved")
    in_json("adapter_config.json", base_model_name_or_path=str(moved))(tmp_path / "adapter")
    assert key(tmp_path / "adapter") == first
    one_weight(moved)
    assert key(tmp_path / "adapter")["weights"] != first["weights"]


def test_a_folder_without_safetensors_has_no_key(copy: Path) -> None:
    torch.save({}, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        key(copy)
