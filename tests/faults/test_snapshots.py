"""B45 to B48 in real, tiny runs: what is saved, which stay, what is read back of broken ones, and where."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import random_trajectories
from safetensors.torch import load_file

from rein import cli
from rein.config.load import load
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import Interrupted
from rein.runtime.interrupt import Interrupt
from rein.snapshots import RunState, Snapshots
from rein.stages import train
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.tracking.jsonl import read_metrics, untimed

pytestmark = pytest.mark.long

STEPS = 7  # of two updates each: the critic's, the actor's
TENSORS, STATE = "tensors.safetensors", "state.json"
Words = Callable[..., list[str]]


@pytest.fixture(scope="module")
def words(tiny_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Words:
    """The words of a run of 7 steps over 12 rows; others replace its own."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(12))]
    write_rows(folder / "rows.parquet", rows, TRAJECTORIES, {})
    shared = f"""
        model.path={tiny_lm} data.train_files={folder}/rows.parquet data.holdout_fraction=0
        data.max_response_length=9 data.train_batch_size=4 actor.ppo_mini_batch_size=4 actor.ppo_epochs=1
        actor.optim.lr=1e-2 critic.optim.lr=1e-2 trainer.critic_warmup=0 threads=1
        trainer.total_training_steps={STEPS} trainer.save_freq=1 cache={folder}/cache
        guards.preset=off
    """.split()

    def of(out: object, *more: str) -> list[str]:
        return [
            f"{key}={value}" for key, value in dict(w.split("=", 1) for w in (*shared, *more)).items()
        ] + [f"out={out}"]

    return of


@pytest.fixture(scope="module")
def finished(words: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unbroken run; its last two snapshots are there."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert cli.main(["train", *words(out)]) == 0
    return out


def ring(out: Path) -> Snapshots:
    return Snapshots(out / "train" / "snapshots")


def equal(out: Path, other: Path) -> bool:
    """Weights of actor and critic bit for bit, metrics but for their times."""
    for model in ("last", "best", "critic"):
        one, two = (load_file(run / "train" / model / "model.safetensors") for run in (out, other))
        if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one):
            return False
    lines = [untimed(read_metrics(run / "train" / "metrics.jsonl")) for run in (out, other)]
    return lines[0] == lines[1]


def broken_off(words: list[str], after: int) -> None:
    """A run that Ctrl-C ends after so many updates."""
    job, interrupt, done = open_job(load(None, words)[0], Console(quiet=True)), Interrupt(), []

    def advance(steps: int = 1, note: str = "") -> None:
        done.append(steps)
        interrupt.signal_number = 2 * (len(done) == after)

    with pytest.raises(Interrupted, match=f"stopped after update {after} of {2 * STEPS}, state saved"):
        train.train(job, interrupt, advance)
    job.close()


# ---- B45: state that cannot be loaded


def test_a_snapshot_of_a_run_is_safetensors_and_json_and_nothing_else(finished: Path) -> None:
    for number in ring(finished).numbers():
        folder = ring(finished).folder / f"step-{number}"
        assert {path.name for path in folder.iterdir()} == {STATE, TENSORS}
        body = json.loads((folder / "state.json").read_text())
        assert (body["kind"], body["number"]) == ("train", number)
        assert {name.partition("/")[0] for name in load_file(folder / TENSORS)} == {"actor", "critic"}


@pytest.mark.parametrize("after", [1, 5, 6, 14], ids=lambda n: f"after {n}")
def test_random_state_of_the_process_is_no_part_of_a_run(
    after: int, words: Words, finished: Path, tmp_path: Path
) -> None:
    torch.manual_seed(after)
    broken_off(words(tmp_path), after)
    np.random.seed(after)
    torch.rand(after)
    assert cli.main(["train", *words(tmp_path)]) == 0
    assert equal(tmp_path, finished)


PARTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object]]] = {
    "generators of another release": (
        "rng/torch belongs to no role of this run",
        lambda tensors: tensors.update({"rng/torch": torch.zeros(8, dtype=torch.uint8)}),
    ),
    "no critic": (
        "critic/weight/.* is missing",
        lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("critic/")],
    ),
    "no moments of one weight": (
        "actor/exp_avg_sq/model.norm.weight is missing",
        lambda tensors: tensors.pop("actor/exp_avg_sq/model.norm.weight"),
    ),
    "a weight of another size": (
        r"actor/weight/model.norm.weight is float32 \[31\], not float32 \[32\]",
        lambda tensors: tensors.update({"actor/weight/model.norm.weight": torch.zeros(31)}),
    ),
    "a batch without advantages": (
        "experience/advantages is missing",
        lambda tensors: tensors.pop("experience/advantages"),
    ),
    "a batch of fewer rows": (
        r"experience/advantages is \[3, \d+\], not \[4, \d+\]",
        lambda tensors: tensors.update({"experience/advantages": tensors["experience/advantages"][:3]}),
    ),
    "a batch with more": (
        "experience/entropy belongs to no batch",
        lambda tensors: tensors.update({"experience/entropy": torch.zeros(4, 9)}),
    ),
}


@pytest.mark.parametrize("what", list(PARTS))
def test_a_state_with_other_parts_is_loud_and_nothing_of_it_is_taken(
    what: str, words: Words, tmp_path: Path
) -> None:
    said, change = PARTS[what]
    broken_off(words(tmp_path), 5)
    state = ring(tmp_path).load(5)
    change(state.tensors)
    ring(tmp_path).save(5, state)
    with pytest.raises(Exception, match=f"snapshot: {said}; resume from another snapshot") as caught:
        open_job(load(None, words(tmp_path))[0], Console(quiet=True))
    assert cli.exit_code(caught.value)[0] == 6


# ---- B46: the last step not saved, or saved twice


@pytest.mark.parametrize(
    ("more", "saved"),
    [
        (["trainer.save_freq=3"], [3, 6, 7]),
        (["trainer.save_freq=3", "trainer.total_training_steps=6"], [3, 6]),
        (["trainer.save_freq=4", "trainer.total_training_steps=null", "trainer.total_epochs=2"], [4, 6]),
        (["trainer.save_freq=-1"], [7]),
        (["trainer.save_freq=100"], [7]),
    ],
    ids=["7 every 3", "6 every 3", "two epochs", "at the end only", "less often than the end"],
)
def test_the_end_is_on_disk_once(
    more: list[str], saved: list[int], words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rein.stages.train_job.Snapshots", functools.partial(Snapshots, keep=99))
    assert cli.main(["train", *words(tmp_path, *more)]) == 0
    assert ring(tmp_path).numbers() == [2 * step for step in reversed(saved)]
    files = {path: path.stat().st_mtime_ns for path in ring(tmp_path).folder.rglob("*")}
    assert cli.main(["train", *words(tmp_path, *more)]) == 0
    assert files == {path: path.stat().st_mtime_ns for path in ring(tmp_path).folder.rglob("*")}


@pytest.mark.parametrize("after", [1, 6, 13, 14], ids=lambda n: f"after {n}")
def test_ctrl_c_saves_where_the_run_is_once(
    after: int, words: Words, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rein.stages.train_job.Snapshots", functools.partial(Snapshots, keep=99))
    every_third = words(tmp_path, "trainer.save_freq=3")
    broken_off(every_third, after)
    assert ring(tmp_path).numbers() == sorted({after, *(n for n in (6, 12) if n < after)}, reverse=True)
    assert cli.main(["train", *every_third]) == 0
    assert ring(tmp_path).numbers() == sorted({after, 6, 12, 14}, reverse=True)
    assert equal(tmp_path, finished)


# ---- B47: rotation deletes the wrong one


def test_the_newest_by_number_stay_and_what_is_not_a_snapshot(words: Words, tmp_path: Path) -> None:
    folder = ring(tmp_path).folder
    for name in ("step-abc", "step-9 copy", "notes", "checkpoint-3"):
        (folder / name).mkdir(parents=True)
        (folder / name / "mine.txt").write_text("mine")
    assert cli.main(["train", *words(tmp_path)]) == 0  # through 8, 10, 12: as text, 8 would be the newest
    assert ring(tmp_path).numbers() == [14, 12]
    assert cli.main(["train", *words(tmp_path, "resume=never")]) == 0
    assert ring(tmp_path).numbers() == [14, 12]
    assert len(list(folder.rglob("mine.txt"))) == 4


def test_an_older_run_s_later_step_is_not_the_newest_of_this_one(
    words: Words, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = ring(finished).load(14)
    other = {"settings": dict.fromkeys(older.meta["settings"], "of another run")}
    ring(tmp_path).save(1000, RunState(older.tensors, older.meta | other))
    assert cli.main(["train", *words(tmp_path)]) == 0
    assert "the run finished here had other settings; starting anew" in capsys.readouterr().out
    assert ring(tmp_path).numbers() == [14, 12]
    assert equal(tmp_path, finished)

    keeping = Snapshots(ring(tmp_path).folder, keep=3)
    keeping.save(1000, RunState(older.tensors, older.meta | other | {"finished": False}))
    assert cli.main(["train", *words(tmp_path)]) == 6
    assert "an unfinished run with other settings" in capsys.readouterr().err
    assert ring(tmp_path).numbers() == [1000, 14, 12]


def test_broken_later_steps_do_not_push_out_whole_ones(
    words: Words, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_off(words(tmp_path), 5)
    for number in (1000, 1001):
        shutil.copytree(ring(tmp_path).folder / "step-5", ring(tmp_path).folder / f"step-{number}")
        (ring(tmp_path).folder / f"step-{number}" / "tensors.safetensors").write_bytes(b"")
    assert cli.main(["train", *words(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "step-1001/state.json: is step 5, not 1001; rename the folder passed over" in said
    assert "resume: from update 5 of 14" in said
    assert ring(tmp_path).numbers() == [14, 12]
    assert equal(tmp_path, finished)


def test_a_disk_that_fills_up_in_a_save_keeps_the_older_ones_and_the_run_goes_on(
    words: Words, finished: Path, disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(path.stat().st_size for path in (finished / "train" / "best").rglob("*")) + 2**17
    one = sum(path.stat().st_size for path in (ring(finished).folder / "step-14").iterdir())
    folder = disk(f"size={(size + int(2.6 * one)) // 1024}k")
    out = folder / "run"
    assert cli.main(["train", *words(out)]) == 6
    error = capsys.readouterr().err
    assert "step-6: cannot be saved" in error
    assert "free space or choose another out=; older ones stay: step-4, step-2\n" in error
    assert {path.name for path in ring(out).folder.iterdir()} == {"step-2", "step-4"}
    assert all(ring(out).load(number).meta["cursor"]["number"] == number for number in (2, 4))

    assert cli.main(["train", *words(out)]) == 6  # as long as there is no room
    assert "step-6: cannot be saved" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
    assert cli.main(["train", *words(out)]) == 0
    assert "resume: from update 4 of 14" in capsys.readouterr().out
    assert equal(out, finished)
    assert not list(out.rglob(".*"))


def test_a_run_in_a_folder_that_can_only_be_read_is_refused_and_its_snapshots_serve_another(
    words: Words,
    finished: Path,
    tmp_path: Path,
    disk: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = disk("size=16m")
    broken_off(words(folder / "run"), 5)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert cli.main(["train", *words(folder / "run")]) == 6
    assert f"out: {folder}/run cannot be written to" in capsys.readouterr().err
    resume = f"resume={folder}/run/train/snapshots/step-5"
    assert cli.main(["train", *words(tmp_path / "run", resume)]) == 0
    assert "resume: from update 5 of 14" in capsys.readouterr().out
    for model in ("last", "critic"):
        one, two = (
            load_file(run / "train" / model / "model.safetensors") for run in (tmp_path / "run", finished)
        )
        assert all(torch.equal(one[name], two[name]) for name in one)


# ---- B48: renames and paths


@pytest.mark.parametrize("name", ["with spaces", "ünï cødé 数", "a:b", "sub/of/it", "trailing/", "-dash"])
def test_a_run_goes_on_in_a_folder_of_any_name(
    name: str, words: Words, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    broken_off(words(name), 5)
    assert cli.main(["train", *words(name)]) == 0
    assert ring(Path(name)).numbers() == [14, 12]
    assert equal(Path(name), finished)
    assert os.listdir(tmp_path) == ["here"]
    assert os.listdir() == [name.split("/")[0]]


@pytest.mark.parametrize("missing", ["./model", "model", "model/", "../gone/model", "{}/model", "a/b/c"])
def test_a_missing_local_model_is_told_at_once_and_asked_of_no_hub(
    missing: str, words: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = missing.format(tmp_path)
    assert cli.main(["train", *words(tmp_path / "run", f"model.path={missing}")]) == 2
    assert f"path {missing} does not exist; " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("slash", ["", "/", "/.", "/../step-12"])
def test_a_named_snapshot_is_found_however_its_path_is_written(
    slash: str, words: Words, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    resume = f"resume=train/snapshots/step-12{slash}"
    assert cli.main(["train", *words(tmp_path, resume)]) == 0
    assert untimed(read_metrics(tmp_path / "train" / "metrics.jsonl"))[0]["number"] == 13


def test_a_reward_function_that_changes_folder_does_not_move_the_run(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "faults_wanderer.py").write_text(
        "import os\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    os.chdir({str(tmp_path / 'elsewhere')!r})\n"
        "    return float(len(solution_str))\n"
    )
    monkeypatch.chdir(tmp_path)
    own: Any = ["data.holdout_fraction=0.5", "evaluate.reward=faults_wanderer:score", "trainer.test_freq=1"]
    assert cli.main(["train", *words("run", *own)]) == 0
    assert ring(tmp_path / "run").numbers() == [14, 12]
    assert not list((tmp_path / "elsewhere").iterdir())


# ---- broken ones in a real run


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(bytes(data))


BROKEN: dict[str, Callable[[Path], object]] = {
    "a bit of the tensors": lambda f: flip(f / TENSORS, -1000),
    "a bit of the state": lambda f: flip(f / STATE, 100),
    "torn tensors": lambda f: os.truncate(f / TENSORS, 4096),
    "torn state": lambda f: os.truncate(f / STATE, 100),
    "no tensors": lambda f: (f / TENSORS).unlink(),
    "no state": lambda f: (f / STATE).unlink(),
    "tensors of zero bytes": lambda f: os.truncate(f / TENSORS, 0),
    "a state of zero bytes": lambda f: os.truncate(f / STATE, 0),
    "foreign": lambda f: (f / STATE).write_text('{"trainer_state": {"global_step": 14}}'),
    "of an older version": lambda f: (f / STATE).write_text('{"version": 1, "number": 14, "meta": {}}'),
    "of another kind": lambda f: Snapshots(f.parent, kind="sft").save(14, RunState({}, {"settings": "x"})),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_snapshot_is_named_and_the_next_older_whole_one_serves(
    what: str, words: Words, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    newest, older = (ring(out).folder / f"step-{number}" for number in (14, 12))
    BROKEN[what](newest)
    flip(older / TENSORS, -1)
    assert cli.main(["train", *words(out)]) == 6
    assert f"error: {newest}" in (error := capsys.readouterr().err)
    assert "No whole snapshot is left; start anew with resume=never" in error

    flip(older / TENSORS, -1)
    assert cli.main(["train", *words(out)]) == 0
    said = capsys.readouterr().out
    assert f"resume: {newest}" in said
    assert "passed over" in said
    assert "resume: from update 12 of 14" in said
    assert ring(out).numbers() == [14, 12]
    assert equal(out, finished)
