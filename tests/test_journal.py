"""Every line is on disk before the run goes on; what was torn, undone by a resume or is no number is told."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rein.errors import CheckpointError
from rein.journal import RESUME, Journal, read, standing


def kept(path: Path) -> list[tuple[int, str]]:
    return [(line["seq"], line["kind"]) for line in read(path)]


def filled(path: Path, *kinds: str) -> Journal:
    journal = Journal(path)
    for kind in kinds:
        journal.append(kind, number=7)
    return journal


def test_lines_are_numbered_on_and_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "train" / "journal.jsonl"
    journal = Journal(path)
    facts: dict[str, Any] = {
        "number": 57, "rule": "kl", "value": 0.31, "changed": {"lr": [1.0, 0.3], "grad_clip": [None, 0.5]},
        "excluded": ["a", "b"], "reason": "probe/kl_reference 0.31 is above 0.3", "from": 57, "to": 40,
    }  # fmt: skip
    said = journal.append("verdict", **facts)
    assert {key: said[key] for key in facts} == facts
    assert read(path) == [said]
    again = Journal(path)
    assert again.seq == 1
    again.append("rollback")
    assert kept(path) == [(1, "verdict"), (2, "rollback")]
    first, second = (line["time"] for line in read(path))
    assert 1.6e9 < first <= second


def test_without_a_file_there_is_nothing_and_the_first_line_is_1(tmp_path: Path) -> None:
    path = tmp_path / "none" / "journal.jsonl"
    assert read(path) == []
    journal = Journal(path)
    assert journal.seq == 0
    assert not path.parent.exists()  # a run of which nothing is said leaves no file
    assert journal.append("verdict")["seq"] == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_its_name_wherever_it_stands(value: float, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    said = Journal(path).append("verdict", value=value, changed={"lr": [1.0, value]}, ends=(value, 2))
    name = str(value)
    assert said["value"] == name
    (line,) = read(path)
    assert (line["value"], line["changed"], line["ends"]) == (name, {"lr": [1.0, name]}, [name, 2])
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("reason", ["a\nb", "line\u2028separator", "next\x85line", "\x1c\x0c", "größer"])
def test_whatever_a_reason_holds_is_one_line(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for _ in range(2):
        journal.append("verdict", reason=reason)
    assert [line["reason"] for line in read(path)] == [reason] * 2
    assert Journal(path).seq == 2


# torn


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_last_line_that_a_kill_cut_off_is_left_out(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    filled(path, "a", "b", "c")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    left = [(1, "a"), (2, "b")]
    assert kept(path) == (left if cut > 1 else [*left, (3, "c")])


@pytest.mark.parametrize(
    "torn", [b'{"seq": 3, "ki', b"{", b'{"seq": 3, "kind": "ver\xc3', b"\x00\x00\x00\x00", b"3"]
)
def test_what_comes_after_a_torn_line_stands_on_a_line_of_its_own(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    filled(path, "a", "b")
    with path.open("ab") as file:
        file.write(torn)
    filled(path, "c", "d")
    assert kept(path) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert torn in path.read_bytes().split(b"\n")


def test_lines_that_are_no_journal_s_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('[]\n{"number": 3}\n{"seq": "2", "kind": "a"}\n\n{"seq": 4, "kind": "b"}\nnull\n')
    assert kept(path) == [(4, "b")]
    assert Journal(path).append("c")["seq"] == 5


# what holds after resumes


def test_a_resume_takes_back_what_came_after_its_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = filled(path, "a", "b", "c")
    journal.resumed(1, 40)  # the snapshot knew the first line alone
    journal.append("d")
    assert [line["kind"] for line in standing(read(path))] == ["a", "d"]
    assert len(read(path)) == 5  # nothing is ever taken out of the file
    resume = read(path)[3]
    assert (resume["kind"], resume["keeps"], resume["number"]) == (RESUME, 1, 40)


def test_resumes_of_resumes_hold_what_the_last_one_knew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = filled(path, "a", "b")
    journal.resumed(1, 10)  # 3
    journal.append("c")  # 4
    journal.append("d")  # 5
    journal.resumed(4, 20)  # 6: a snapshot taken after c
    journal.append("e")  # 7
    assert [line["kind"] for line in standing(read(path))] == ["a", "c", "e"]
    journal.resumed(0, 0)
    assert standing(read(path)) == []
    assert journal.append("f")["seq"] == 9
    assert [line["kind"] for line in standing(read(path))] == ["f"]


def test_a_resume_that_takes_nothing_back_leaves_no_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = filled(path, "a", "b")
    journal.resumed(2, 40)
    assert kept(path) == [(1, "a"), (2, "b")]
    Journal(tmp_path / "other").resumed(0, 0)
    assert not (tmp_path / "other").exists()


def test_a_run_that_starts_anew_starts_its_journal_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = filled(path, "a", "b")
    journal.clear()
    assert not path.exists()
    journal.clear()
    journal.append("c")
    assert kept(path) == [(1, "c")]


# a disk that does not take it


def test_a_file_that_cannot_be_written_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    journal = Journal(tmp_path / "folder" / "journal.jsonl")
    (tmp_path / "folder" / "journal.jsonl").mkdir()
    with pytest.raises(
        CheckpointError, match=r"journal\.jsonl: cannot be written \(Is a directory\); free the"
    ):
        journal.append("verdict")
    journal = Journal(tmp_path / "journal.jsonl")
    journal.path = tmp_path / "file" / "journal.jsonl"
    with pytest.raises(
        CheckpointError, match=r"cannot be written \(.*\); free the disk or choose another out="
    ):
        journal.append("verdict")


def test_a_full_disk_leaves_what_was_written_and_the_next_line_stands_apart(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = filled(path, "a", "b")
    with full_disk(path.stat().st_size + 10), pytest.raises(CheckpointError, match="File too large"):
        journal.append("c")
    assert kept(path) == [(1, "a"), (2, "b")]
    filled(path, "d")
    assert [kind for _, kind in kept(path)] == ["a", "b", "d"]
