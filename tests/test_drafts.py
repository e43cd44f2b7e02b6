"""Nothing that a killed process left stays beside a target, and nothing else there is touched."""

import os
from pathlib import Path

import pytest

from rein.drafts import draft_of, replace_folder, twin_folder


def folder(path: Path, said: str = "") -> Path:
    path.mkdir()
    (path / "file").write_text(said)
    return path


def names(path: Path) -> set[str]:
    return {found.name for found in path.iterdir()}


@pytest.mark.parametrize("name", ["best", "rows.parquet", "a[b]*"])
def test_drafts_that_a_kill_left_go_with_the_next_one(name: str, tmp_path: Path) -> None:
    folder(tmp_path / name)
    folder(tmp_path / f".{name}.0badcafe")
    folder(tmp_path / f".{name}.0badcafe.old")
    folder(tmp_path / f"..{name}.0badcafe.00c0ffee")
    (tmp_path / f".{name}.12345678").write_text("half")
    mine = {name, f".{name}.notes", ".other.0badcafe", f".x{name}.0badcafe", f"{name}.0badcafe"}
    for other in mine - {name}:
        folder(tmp_path / other)
    draft = draft_of(tmp_path / name)
    assert names(tmp_path) == mine
    assert draft.parent == tmp_path
    assert not draft.exists()


def test_two_drafts_of_a_target_never_meet(tmp_path: Path) -> None:
    assert draft_of(tmp_path / "best") != draft_of(tmp_path / "best")
    assert draft_of(tmp_path / "none" / "best").parent == tmp_path / "none"


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    folder(tmp_path / ".best.0badcafe.old", "whole")
    folder(tmp_path / ".best.00c0ffee", "half")
    draft_of(tmp_path / "best")
    assert names(tmp_path) == {"best"}
    assert (tmp_path / "best" / "file").read_text() == "whole"


def test_a_folder_takes_the_place_of_another_whole_and_what_was_left_goes(tmp_path: Path) -> None:
    target = folder(tmp_path / "best", "old")
    folder(tmp_path / ".best.0badcafe")
    replace_folder(folder(tmp_path / ".best.00c0ffee", "new"), target)
    assert names(tmp_path) == {"best"}
    assert (target / "file").read_text() == "new"


def test_a_twin_takes_no_room_and_stays_when_the_other_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, best = folder(tmp_path / "last", "new"), folder(tmp_path / "best", "old")
    twin_folder(last, best)
    assert (best / "file").samefile(last / "file")
    replace_folder(folder(tmp_path / "draft", "newer"), last)
    assert (best / "file").read_text() == "new"
    assert names(tmp_path) == {"best", "last"}

    monkeypatch.setattr(os, "link", unlinked)
    twin_folder(last, best)  # where the file system has no links
    assert (best / "file").read_text() == "newer"
    assert not (best / "file").samefile(last / "file")


def unlinked(source: str, target: str) -> None:
    raise OSError(f"{source}, {target}: not supported")
