"""`rein cache`: what it lists, what it removes, and what it never touches."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from rein import cli
from rein.commands.cache import bytes_in_words, size_of
from rein.data.cache import ScoreCache
from rein.errors import ConfigError

DAY = 86400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three entries of 100 rows, last used 0, 10 and 40 days ago."""
    place = tmp_path / "kept"
    for kind, days in (("ref_log_probs", 0), ("score", 10), ("behavior_log_probs", 40)):
        cache = ScoreCache(
            place, kind, {"weights": kind, "numeric path": "float32 cpu"}, {"model": "models/a"}
        )
        cache.add({f"row {i}": np.arange(20, dtype=np.float32) * i for i in range(100)})
        then = time.time() - days * DAY
        os.utime(cache.folder / "key.json", (then, then))
    return place


def rein(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["cache", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def kinds(folder: Path) -> set[str]:
    return {p.parent.parent.name for p in folder.glob("*/*/*.parquet")}


def test_ls_tells_kind_model_rows_size_and_last_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = rein(capsys, "ls", f"cache={folder}")
    assert code == 0
    first, *_, total = said.splitlines()
    assert first.startswith(
        "recomputed behavior log-probs of models/a (weights behavior, float32 cpu): 100 rows, "
    )
    assert first.endswith("KiB, last used 40 days ago")
    assert "reward-model scores of models/a" in said
    assert "last used today" in said
    assert total.startswith(f"{folder}: 3 entries, ")


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rein(capsys, "ls", f"out={tmp_path}/run") == (
        0,
        f"{tmp_path}/rein-cache: no such folder, so nothing is kept there\n",
    )
    assert rein(capsys, "prune", "--all", f"out={tmp_path}/run")[0] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--older-than", "30"], {"ref_log_probs", "score"}),
        (["--older-than=5"], {"ref_log_probs"}),
        (["--older-than", "50"], {"ref_log_probs", "score", "behavior_log_probs"}),
        (["--all"], set()),
        (["--max-size", "0"], set()),
        (["--max-size", "1GB"], {"ref_log_probs", "score", "behavior_log_probs"}),
        (["--older-than", "5", "--max-size", "1GB"], {"ref_log_probs"}),
    ],
)
def test_prune_removes_what_is_old_or_too_much_and_a_dry_run_says_the_same(
    folder: Path, words: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    code, planned = rein(capsys, "prune", *words, "--dry-run", f"cache={folder}")
    assert code == 0
    assert sorted(folder.rglob("*")) == before
    code, done = rein(capsys, "prune", f"cache={folder}", *words)
    assert code == 0
    assert kinds(folder) == left
    told = [line.removeprefix("would remove ") for line in planned.splitlines() if "would remove" in line]
    assert told == [
        line.removeprefix("removed ") for line in done.splitlines() if line.startswith("removed ")
    ]
    assert len(told) == 3 - len(left)


def test_the_size_that_may_stay_keeps_what_was_used_last(folder: Path) -> None:
    one = sum(f.stat().st_size for f in next(folder.glob("ref_log_probs/*")).iterdir())
    assert cli.main(["cache", "prune", "--max-size", f"{one / 1024 * 1.5:.3f}K", f"cache={folder}"]) == 0
    assert kinds(folder) == {"ref_log_probs"}


def test_prune_never_touches_what_the_cache_did_not_make(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = next(folder.glob("score/*"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.parquet").write_text("theirs")
    theirs = [
        folder / "notes.txt",
        folder / "score" / "data.parquet",
        entry / "mine.parquet",
        folder / "score" / ("0" * 64) / "key.json",
        folder / "score" / ("1" * 64) / "key.json",
    ]
    for file in theirs:
        file.parent.mkdir(exist_ok=True)
        file.write_text((entry / "key.json").read_text() if file.name == "key.json" else "theirs")
    (folder / "score" / ("1" * 64) / "key.json").write_text("[]")
    (folder / "linked").symlink_to(elsewhere)
    assert rein(capsys, "prune", "--all", f"cache={folder}")[0] == 0
    assert kinds(folder) == {"score"}
    assert all(file.exists() for file in (*theirs, elsewhere / "a.parquet", folder / "linked"))
    assert sorted(f.name for f in entry.iterdir()) == ["mine.parquet"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prune"], "says not what; give --older-than DAYS, --max-size SIZE or --all"),
        (["prune", "--older-than", "soon"], "--older-than=soon; give a number of days"),
        (["prune", "--older-than=-1"], "--older-than=-1; give"),
        (["prune", "--max-size", "big"], "--max-size=big; give a size"),
        (["ls", "--all"], "takes no option"),
        (["prnue"], "did you mean prune?"),
        ([], "write ls or prune"),
        (["ls", "nothere.yaml"], "no such recipe file"),
    ],
)
def test_wrong_use_is_refused_and_removes_nothing(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = rein(capsys, *words, *([f"cache={folder}"] if words and "yaml" not in words[-1] else []))
    assert code == 2
    assert said in found
    assert len(kinds(folder)) == 3


def test_sizes_are_read_and_told() -> None:
    assert [size_of(text) for text in ("0", "12", "1k", "1.5MB", "2 GiB")] == [0, 12, 1024, 3 << 19, 2 << 30]
    assert [bytes_in_words(n) for n in (0, 1023, 1536, 5 << 30)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5 GiB",
    ]
    with pytest.raises(ConfigError):
        size_of("1x")
