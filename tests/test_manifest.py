"""Manifests: the same work has the same fingerprint, other work another, and nothing half-written counts."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rein import hashing, manifest
from rein.config.load import load
from rein.config.recipe import Recipe

SEED_FILE = "rows"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.parquet"
    file.write_bytes(b"rows" * 100)
    return file


def recipe_of(*words: str) -> Recipe:
    return load(None, words)[0]


def mark(stage: str, data: Path, *words: str) -> str:
    return manifest.fingerprint(recipe_of(*words), stage, [str(data)])


def write(folder: Path, data: Path, *words: str, stage: str = "train") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "best").mkdir(exist_ok=True)
    manifest.write(
        folder,
        stage=stage,
        recipe=recipe_of(*words),
        inputs=[str(data)],
        rows={"in": 3, "rejected": 1, "trained": 2},
        facts={"loss": float("nan"), "to": None, "path": folder},
        seconds=1.234,
    )


def test_a_written_manifest_means_done_for_the_same_work_only(tmp_path: Path, data: Path) -> None:
    write(tmp_path / "train", data)
    assert manifest.is_done(tmp_path / "train", mark("train", data))
    assert not manifest.is_done(tmp_path / "train", mark("train", data, "seed=1"))
    assert not manifest.is_done(tmp_path / "elsewhere", mark("train", data))


def test_it_says_what_was_made_from_what(tmp_path: Path, data: Path) -> None:
    write(tmp_path / "train", data, "seed=7")
    body = json.loads((tmp_path / "train" / "manifest.json").read_text())
    assert body["stage"] == "train"
    assert body["seed"] == body["recipe"]["seed"] == 7
    assert body["rows"] == {"in": 3, "rejected": 1, "trained": 2}
    assert body["outputs"] == ["best"]
    assert body["facts"]["loss"] is None
    assert len(body["inputs"][str(data)]) == 64
    assert set(body["versions"]) == {"python", "rein", "torch", "transformers", "numpy", "pyarrow"}


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ("sft", "sft.optim.lr=1e-3"),
        ("sft", "data.max_prompt_length=7"),
        ("sft", "model.lora_rank=4"),
        ("rollout", "rollout.n=3"),
        ("score", "score.reward=exact"),
        ("train", "actor.optim.lr=1e-3"),
        ("train", "algorithm.lam=0.9"),
        ("train", "data.train_batch_size=512"),
        ("train", "trainer.total_epochs=3"),
        ("train", "evaluate.reward=exact"),
        ("train", "sft.share=0.05 sft.files=a.parquet"),
        ("evaluate", "evaluate.pass_k=2"),
    ],
)
def test_settings_that_a_stage_reads_make_it_other_work(stage: str, word: str, data: Path) -> None:
    assert mark(stage, data) != mark(stage, data, *word.split())


@pytest.mark.parametrize(
    ("stage", "word"),
    [
        ("sft", "actor.optim.lr=1e-3"),
        ("sft", "data.train_batch_size=512"),
        ("reward", "sft.share=0.05 sft.files=a.parquet"),
        ("rollout", "algorithm.lam=0.9"),
        ("score", "evaluate.pass_k=2"),
        ("train", "sft.optim.lr=1e-3"),
        ("train", "trainer.save_freq=5"),
        ("train", "out=elsewhere"),
        ("train", "threads=1"),
        ("train", "evaluate.pass_k=2"),
        ("train", "resume=never"),
        ("evaluate", "actor.optim.lr=1e-3"),
    ],
)
def test_other_settings_do_not(stage: str, word: str, data: Path) -> None:
    assert mark(stage, data) == mark(stage, data, *word.split())


def test_demonstrations_that_train_mixes_in_are_no_other_work_for_sft(data: Path) -> None:
    plain, mixed = (mark("sft", data, "sft.files=a.parquet", *word) for word in ((), ("sft.share=0.05",)))
    assert plain == mixed


def test_the_content_of_inputs_counts_and_not_their_place(tmp_path: Path, data: Path) -> None:
    before = mark("train", data)
    moved = tmp_path / "moved.parquet"
    data.rename(moved)
    assert mark("train", moved) == before
    moved.write_bytes(b"rowz" * 100)
    assert mark("train", moved) != before
    moved.unlink()
    assert mark("train", moved) != before


def test_where_models_and_files_lie_is_no_other_work(tmp_path: Path, data: Path) -> None:
    there, _ = load(None, [f"sft.files={data}", f"model.path={tmp_path}/a"])
    here, _ = load(None, [f"sft.files={data.name}", f"model.path={tmp_path}/b"])
    unnamed, _ = load(None, [f"model.path={tmp_path}/b"])
    inputs = [str(data)]
    assert manifest.fingerprint(there, "sft", inputs) == manifest.fingerprint(here, "sft", inputs)
    assert manifest.fingerprint(unnamed, "sft", inputs) != manifest.fingerprint(here, "sft", inputs)


def test_a_folder_is_its_names_and_contents_but_not_its_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("1")
    (folder / "sub" / "b").write_text("2")
    before = manifest.hash_input(str(folder))
    (folder / "manifest.json").write_text("{}")
    (folder / ".draft").write_text("x")
    assert manifest.hash_input(str(folder)) == before
    (folder / "a").rename(folder / "c")
    assert manifest.hash_input(str(folder)) != before


def test_a_pattern_is_the_files_it_matches(tmp_path: Path) -> None:
    for name in ("p-0.parquet", "p-1.parquet"):
        (tmp_path / name).write_text(name)
    pattern = str(tmp_path / "p-*.parquet")
    before = manifest.hash_input(pattern)
    (tmp_path / "p-2.parquet").write_text("more")
    assert manifest.hash_input(pattern) != before


def test_a_copy_of_a_models_weights_is_the_same_whenever_it_was_made(tmp_path: Path) -> None:
    """A run folder that was copied keeps what was judged of its models."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").write_bytes(os.urandom(2**20) * 80)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.utime(tmp_path / "copy" / "weights", ns=(0, 0))
    assert manifest.hash_input(str(tmp_path / "copy")) == manifest.hash_input(str(tmp_path / "run"))


def test_a_large_file_is_sampled_and_still_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "WHOLE_UP_TO", 2**20)
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(2**21))
    before = manifest.hash_input(str(file))
    assert before == manifest.hash_input(str(file))
    with file.open("r+b") as stream:
        stream.seek(-10, os.SEEK_END)
        stream.write(b"0123456789")
    os.utime(file, ns=(0, 0))
    assert manifest.hash_input(str(file)) != before


def test_a_result_that_lost_a_part_is_not_done(tmp_path: Path, data: Path) -> None:
    write(tmp_path / "train", data)
    (tmp_path / "train" / "best").rmdir()
    assert not manifest.is_done(tmp_path / "train", mark("train", data))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}'])
def test_a_broken_manifest_is_no_manifest(text: str, tmp_path: Path, data: Path) -> None:
    write(tmp_path / "train", data)
    (tmp_path / "train" / "manifest.json").write_text(text)
    assert manifest.read(tmp_path / "train") is None
    assert not manifest.is_done(tmp_path / "train", mark("train", data))


def test_a_staged_folder_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(FileNotFoundError), manifest.staged(target) as draft:
        (draft / "half").rename(draft / "nothere" / "half")
    assert list(tmp_path.iterdir()) == []
    with manifest.staged(target) as draft:
        (draft / "whole").write_text("1")
    with pytest.raises(FileNotFoundError), manifest.staged(target) as draft:
        (draft / "nothere").read_text()
    assert (target / "whole").read_text() == "1"
    with manifest.staged(target) as draft:
        (draft / "newer").write_text("2")
    assert [p.name for p in target.iterdir()] == ["newer"]
    assert [p.name for p in tmp_path.iterdir()] == ["made"]
