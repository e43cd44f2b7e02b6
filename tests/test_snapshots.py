"""Snapshots are whole or not there, damaged ones are found and named, and rotation counts by number."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rein.errors import CheckpointError
from rein.snapshots import RunState, Snapshots, load


def state(number: int) -> RunState:
    generator = torch.Generator().manual_seed(number)
    tensors = {
        "weight/a": torch.randn(50, 7, generator=generator),
        "step/a": torch.tensor(float(number)),
        "rows": torch.arange(number, dtype=torch.int64),
        "mask": torch.tensor([True, False]),
        "wide": torch.randn(3, generator=generator, dtype=torch.float64),
    }
    return RunState(
        tensors, {"cursor": {"batch": number}, "kl_coef": 0.1 + 0.2, "nothing": None, "bad": 1e-300}
    )


def same(one: RunState, other: RunState) -> bool:
    equal = all(torch.equal(one.tensors[k], other.tensors[k]) for k in one.tensors)
    kinds = all(one.tensors[k].dtype == other.tensors[k].dtype for k in one.tensors)
    return equal and kinds and one.tensors.keys() == other.tensors.keys() and one.meta == other.meta


def numbers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_was_saved_comes_back_bit_by_bit(tmp_path: Path) -> None:
    saved = Snapshots(tmp_path).save(7, state(7))
    assert saved == tmp_path / "step-7"
    assert same(load(saved), state(7))
    found, passed_over = Snapshots(tmp_path).newest()
    assert found is not None
    assert same(found, state(7))
    assert passed_over == []


def test_without_snapshots_there_is_a_fresh_start(tmp_path: Path) -> None:
    assert Snapshots(tmp_path / "none").newest() == (None, [])
    assert Snapshots(tmp_path).newest() == (None, [])
    Snapshots(tmp_path / "none").clear()


def test_nothing_in_a_snapshot_is_a_pickle(tmp_path: Path) -> None:
    saved = Snapshots(tmp_path).save(1, state(1))
    assert numbers(saved) == {"state.json", "tensors.safetensors"}
    assert json.loads((saved / "state.json").read_text())["meta"]["cursor"] == {"batch": 1}


def test_whoever_may_read_the_state_may_read_the_tensors(tmp_path: Path) -> None:
    modes = {path.stat().st_mode for path in Snapshots(tmp_path).save(1, state(1)).iterdir()}
    assert len(modes) == 1


def test_the_two_newest_by_number_stay_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    others = {"step-best", "step-abc", "step-007", "step-", "step-²", "notes", "old-3"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").write_text("a file")
    ring = Snapshots(tmp_path)
    for number in (9, 10, 11):  # as text, 9 would be the newest
        ring.save(number, state(number))
    assert numbers(tmp_path) == {"step-10", "step-11", "step-12", *others}
    assert ring.numbers() == [11, 10]
    found, _ = ring.newest()
    assert found is not None
    assert found.meta["cursor"]["batch"] == 11


def test_one_stays_where_one_is_asked_for(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path, keep=1)
    for number in (1, 2):
        ring.save(number, state(number))
    assert numbers(tmp_path) == {"step-2"}


def test_protected_numbers_stay_beside_the_newest(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path, keep=2)
    for number in (3, 9, 10, 11):
        ring.save(number, state(number), protect=[3, 99])
    assert ring.numbers() == [11, 10, 3]
    assert same(ring.load(3), state(3))
    ring.save(12, state(12))
    assert ring.numbers() == [12, 11]


def test_equal_or_turned_times_of_the_files_change_nothing(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    ring.save(9, state(9))
    os.utime(ring.save(10, state(10)), (0, 0))
    ring.save(11, state(11))
    assert ring.numbers() == [11, 10]


def test_the_one_just_saved_stays_where_higher_numbers_lie_there(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    for number in (1000, 1001, 5):
        ring.save(number, state(number))
    assert ring.numbers() == [1001, 1000, 5]
    ring.drop_after(5)
    assert ring.numbers() == [5]


def test_saving_a_number_again_puts_the_new_state_in_its_place(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    ring.save(3, state(3))
    ring.save(3, state(4))
    assert numbers(tmp_path) == {"step-3"}
    assert same(load(tmp_path / "step-3"), state(4))


def test_a_save_on_a_full_disk_leaves_the_older_ones(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    ring = Snapshots(tmp_path)
    ring.save(1, state(1))
    ring.save(2, state(2))
    with full_disk(500), pytest.raises(CheckpointError, match="step-3: cannot be saved"):
        ring.save(3, state(3))
    assert numbers(tmp_path) == {"step-1", "step-2"}
    with full_disk(500), pytest.raises(CheckpointError, match="step-2: cannot be saved"):
        ring.save(2, state(9))
    found, passed_over = ring.newest()
    assert found is not None
    assert same(found, state(2))
    assert passed_over == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        Snapshots(tmp_path / "file" / "snapshots").save(1, state(1))


def test_what_a_killed_process_left_is_no_snapshot_and_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".draft-0badcafe").mkdir()
    (tmp_path / ".draft-0badcafe" / "tensors.safetensors").write_bytes(b"half")
    (tmp_path / ".old-0badcafe").mkdir()
    ring = Snapshots(tmp_path)
    assert ring.newest() == (None, [])
    ring.save(1, state(1))
    assert numbers(tmp_path) == {"step-1"}


def test_a_number_set_aside_counts_until_its_successor_stands(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    ring.save(2, state(2))
    ring.save(3, state(3)).rename(tmp_path / ".old-3")  # killed between the two renames of a save
    (tmp_path / ".draft-0badcafe").mkdir()
    found, passed_over = ring.newest()
    assert found is not None
    assert same(found, state(3))
    assert passed_over == []
    ring.save(4, state(4))
    assert numbers(tmp_path) == {"step-4", ".old-3"}
    assert same(ring.load(3), state(3))
    ring.save(3, state(9))
    assert numbers(tmp_path) == {"step-4", "step-3"}
    assert same(ring.load(3), state(9))


CALLS = {"mkdir", "open", "write", "fsync", "rename", "rmdir", "unlink", "serialize_file"}


def killed_in(work: Callable[[], object], place: int) -> bool:
    """Whether `work`, in a process of its own, came as far as its call of that place and was killed there."""

    def kill_at(frame: FrameType, event: str, called: Any) -> None:
        nonlocal place
        if event == "c_call" and called.__name__ in CALLS:
            place -= 1
            if place < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        sys.setprofile(kill_at)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "keep"), [(2, 1), (3, 2)], ids=["its number again, of one", "the next number, of two"]
)
def test_wherever_a_save_is_killed_the_state_before_it_or_the_new_one_is_whole(
    number: int, keep: int, tmp_path: Path
) -> None:
    ring, found, place = Snapshots(tmp_path, keep=keep), [], 0
    ring.save(1, state(1))
    ring.save(2, state(2))
    before = {path.name for path in tmp_path.iterdir()}
    while killed_in(lambda: ring.save(number, state(9)), place):
        newest, passed_over = ring.newest()
        assert newest is not None
        assert passed_over == []
        found.append(newest.meta["cursor"]["batch"])
        assert same(newest, state(found[-1]))
        ring.save(4, state(4))
        assert len(numbers(tmp_path)) == keep, "what was left goes with the next save"
        ring.clear()
        ring.save(1, state(1))
        ring.save(2, state(2))
        assert numbers(tmp_path) == before
        place += 1
    assert set(found) == {2, 9}
    assert found == sorted(found), "once the new one stands, it stays"
    assert place > 15


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(bytes(data))


def cut(file: Path, place: int) -> None:
    file.write_bytes(file.read_bytes()[:place])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of a weight": lambda f: flip(f / "tensors.safetensors", -1),
    "a bit of the header": lambda f: flip(f / "tensors.safetensors", 20),
    "a cut file of tensors": lambda f: cut(f / "tensors.safetensors", 300),
    "a file of tensors cut by a byte": lambda f: cut(f / "tensors.safetensors", -1),
    "a byte too many": lambda f: lengthen(f / "tensors.safetensors"),
    "an empty state": lambda f: cut(f / "state.json", 0),
    "a bit of the state": lambda f: flip(f / "state.json", 40),
    "a bit of the last place of the state": lambda f: flip(f / "state.json", -3),
    "zeros for tensors": lambda f: (f / "tensors.safetensors").write_bytes(bytes(1000)),
    "a folder for tensors": lambda f: (
        (f / "tensors.safetensors").rename(f / "x") and f.joinpath("tensors.safetensors").mkdir()
    ),
    "an empty file of tensors": lambda f: cut(f / "tensors.safetensors", 0),
    "no tensors": lambda f: (f / "tensors.safetensors").unlink(),
    "another digit of a coefficient": lambda f: (f / "state.json").write_text(
        (f / "state.json").read_text().replace("0.30000000000000004", "0.30000000000000001")
    ),
    "a cut state": lambda f: cut(f / "state.json", 50),
    "a state that is a list": lambda f: (f / "state.json").write_text("[1, 2]"),
    "a state that is no text": lambda f: (f / "state.json").write_bytes(b"\xff\xfe\x00"),
    "a state nested too deeply": lambda f: (f / "state.json").write_text("[" * 100_000),
    "no state": lambda f: (f / "state.json").unlink(),
    "an empty folder": lambda f: [file.unlink() for file in f.iterdir()] and None,
}


@pytest.mark.parametrize("what", list(DAMAGE))
def test_a_damaged_snapshot_is_found_named_and_passed_over(what: str, tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    ring.save(1, state(1))
    DAMAGE[what](ring.save(2, state(2)))
    with pytest.raises(CheckpointError, match=r"step-2/?.*(damaged|not a whole|no state of)"):
        load(tmp_path / "step-2")
    found, passed_over = ring.newest()
    assert found is not None
    assert same(found, state(1))
    assert len(passed_over) == 1
    assert "step-2" in passed_over[0]


def test_where_none_is_whole_the_run_stops_and_never_starts_afresh(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    for number in (1, 2):
        flip(ring.save(number, state(number)) / "tensors.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"step-2.*No whole snapshot is left; start anew"):
        ring.newest()
    ring.clear()
    assert ring.newest() == (None, [])


def test_a_snapshot_of_another_version_is_named_as_such(tmp_path: Path) -> None:
    saved = Snapshots(tmp_path).save(1, state(1))
    body = json.loads((saved / "state.json").read_text())
    body["version"] = 99
    (saved / "state.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"state.json: version 99 is not 6"):
        load(saved)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is no state of Rein's"),
        ('{"version": 4}', "version 4 is not 6"),
        ("[4]", "is no state of Rein's"),
        ("4", "is no state of Rein's"),
        ("", "damaged"),
        ("{'version': 4}", "damaged"),
        ('{"version": "4", "step": 3}', "version '4' is not 6"),
        ('{"version": 3, "number": 1, "meta": {}}', "version 3 is not 6"),
    ],
)
def test_foreign_json_is_named_as_such(text: str, said: str, tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    (ring.save(1, state(1)) / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"step-1/state.json: {said}"):
        ring.load(1)


def test_a_snapshot_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    Snapshots(tmp_path, kind="sft").save(1, state(1))
    for kind in ("train", "reward"):
        with pytest.raises(CheckpointError, match=f"step-1/state.json: is of sft, not of {kind}"):
            Snapshots(tmp_path, kind=kind).newest()
    assert same(Snapshots(tmp_path, kind="sft").load(1), state(1))


def test_a_snapshot_under_another_number_is_named_as_such(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path)
    ring.save(1, state(1)).rename(tmp_path / "step-7")
    with pytest.raises(CheckpointError, match=r"step-7/state.json: is step 1, not 7"):
        ring.load(7)
    assert same(load(tmp_path / "step-7"), state(1))  # by its path, under any name


def test_a_missing_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-5: not a whole snapshot"):
        load(tmp_path / "step-5")


def test_tensors_that_share_memory_and_views_are_saved(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    saved = Snapshots(tmp_path).save(1, RunState({"a": weight, "b": weight, "c": weight.T}, {}))
    found = load(saved).tensors
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)
    assert torch.equal(found["c"], weight.T)


def test_what_json_cannot_tell_apart_still_matches_its_checksum(tmp_path: Path) -> None:
    saved = Snapshots(tmp_path).save(1, RunState({}, {"by number": {10: "a", 9: "b"}, "pair": (1, 2)}))
    assert load(saved).meta == {"by number": {"10": "a", "9": "b"}, "pair": [1, 2]}


def test_going_on_from_an_older_snapshot_forgets_the_later_branch(tmp_path: Path) -> None:
    ring = Snapshots(tmp_path, keep=3)
    for number in (9, 10, 11):
        ring.save(number, RunState({"w": torch.tensor([float(number)])}, {}))
    ring.drop_after(9)
    state, _ = ring.newest()
    assert state is not None
    assert state.tensors["w"].item() == 9.0


def test_a_disk_that_is_full_for_good_leaves_the_older_ones_until_there_is_room(
    tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    folder = disk("size=128k")
    ring = Snapshots(folder)
    ring.save(1, state(1))
    ring.save(2, state(2))
    ballast = folder / "ballast"
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(bytes(2**17))
    for number in (2, 3):
        with pytest.raises(CheckpointError, match=r"cannot be saved.*; older ones stay: step-2, step-1$"):
            ring.save(number, state(9))
        assert numbers(folder) == {"step-1", "step-2", "ballast"}
        assert all(same(ring.load(n), state(n)) for n in (1, 2))
    ballast.unlink()
    ring.save(3, state(3))
    assert numbers(folder) == {"step-3", "step-2"}


def test_a_folder_that_can_only_be_read_is_told_and_can_be_read(
    tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    folder = disk("size=128k")
    Snapshots(folder).save(1, state(1))
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(CheckpointError, match=r"Read-only file system.*older ones stay: step-1$"):
        Snapshots(folder).save(2, state(2))
    found, _ = Snapshots(folder).newest()
    assert found is not None
    assert same(found, state(1))
    with pytest.raises(CheckpointError, match=r"Read-only file system.*there is no older one$"):
        Snapshots(folder / "new").save(2, state(2))
