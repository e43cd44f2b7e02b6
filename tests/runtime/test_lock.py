"""One run at a time in a folder: others are told who is there, and nothing stays locked after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rein.cli import exit_code
from rein.errors import CheckpointError
from rein.runtime.lock import NAME, held

HOLD = (
    "import sys, time; from pathlib import Path; from rein.runtime.lock import held\n"
    "with held(Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.readline()\n"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the folder until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "out"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_run_is_told_who_is_there(other: "subprocess.Popen[str]", tmp_path: Path) -> None:
    out = tmp_path / "out"
    today = time.strftime("%Y-%m-%d", time.localtime((out / NAME).stat().st_mtime))
    said = rf"out: {re.escape(str(out))} is in use by process {other.pid} on \S+ since {today} \d\d:\d\d; "
    with (
        pytest.raises(CheckpointError, match=said + "wait for it or choose another out=") as caught,
        held(out),
    ):
        pass
    assert exit_code(caught.value)[0] == 6
    with held(tmp_path / "elsewhere"):
        pass
    other.communicate("go\n", timeout=10)
    assert not (out / NAME).exists()
    with held(out):
        assert json.loads((out / NAME).read_text())["pid"] == os.getpid()
    assert not (out / NAME).exists()


def test_the_same_folder_under_another_name_is_the_same(
    other: "subprocess.Popen[str]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    for name in ("link", "out/", "./out", "link/../out"):
        with pytest.raises(CheckpointError, match=f"process {other.pid}"), held(Path(name)):
            pass


def test_a_killed_process_leaves_no_lock(other: "subprocess.Popen[str]", tmp_path: Path) -> None:
    out = tmp_path / "out"
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert json.loads((out / NAME).read_text())["pid"] == other.pid
    with held(out):
        assert json.loads((out / NAME).read_text())["pid"] == os.getpid()
    assert not (out / NAME).exists()


def test_a_lock_file_that_says_nothing_still_counts(other: "subprocess.Popen[str]", tmp_path: Path) -> None:
    (tmp_path / "out" / NAME).write_text("")
    with pytest.raises(CheckpointError, match="is in use by another process;"), held(tmp_path / "out"):
        pass


def test_a_process_may_enter_again_and_leaves_once(tmp_path: Path) -> None:
    with held(tmp_path):
        with held(tmp_path / "." / ""):
            pass
        assert (tmp_path / NAME).exists()
    with pytest.raises(ZeroDivisionError), held(tmp_path):
        _ = 1 / 0
    assert not (tmp_path / NAME).exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"out: .*/file/run cannot be written"),
        held(tmp_path / "file/run"),
    ):
        pass


def test_many_that_want_one_folder_have_it_one_at_a_time(tmp_path: Path) -> None:
    take = (
        "import os, sys, time; from pathlib import Path; from rein.errors import CheckpointError\n"
        "from rein.runtime.lock import held\n"
        "out, got, end = Path(sys.argv[1]), 0, time.monotonic() + 1\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        with held(out):\n"
        "            os.close(os.open(out / 'alone', os.O_CREAT | os.O_EXCL))\n"
        "            os.unlink(out / 'alone')\n"
        "            got += 1\n"
        "    except CheckpointError:\n"
        "        pass\n"
        "print(got)\n"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", take, tmp_path], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    counts = [int(process.communicate(timeout=30)[0]) for process in many]
    assert [process.returncode for process in many] == [0, 0, 0]
    assert all(counts)
